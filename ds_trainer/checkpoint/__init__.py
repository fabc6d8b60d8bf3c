"""Saving, resuming, converting and exporting: checkpoints of runs and weights for users."""
