"""Converts checkpoints of DeepSpeed and transformers to the native format, and native ones to DeepSpeed's."""
