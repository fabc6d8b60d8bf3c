"""Checkpoints of plain DeepSpeed and of transformers, read and written."""
