"""Which models can be trained on packed rows, what they need in a batch, and the proof at the start of a run."""
