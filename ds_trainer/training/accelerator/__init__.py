"""``Trainer.accelerator``: what scripts and subclasses of Hugging Face's Trainer call, on our own engine."""
