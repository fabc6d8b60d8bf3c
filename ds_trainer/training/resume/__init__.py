"""Saving during training, and resuming: contents of a checkpoint, compatibility, rollback."""
