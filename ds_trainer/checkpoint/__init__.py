"""What is kept: weights for users, checkpoints for resuming."""
