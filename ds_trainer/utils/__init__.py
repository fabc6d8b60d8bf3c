"""Tiny shared things: errors, logging, files, seeds, rank helpers. Nothing with an opinion about training."""
