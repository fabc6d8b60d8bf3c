"""The engine's state in a checkpoint: shards of tensors, random states, and DeepSpeed's client state."""
