"""Behaviors of transformers' Trainer on which scripts rely, each run with both libraries and compared."""
