"""``Trainer.accelerator``: accelerate's interface for scripts and subclasses, on the Trainer's own engine."""
