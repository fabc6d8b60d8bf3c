"""Scripts and libraries written for transformers.Trainer, unchanged on this package's Trainer."""
