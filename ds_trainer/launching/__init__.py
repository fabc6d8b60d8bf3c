"""Launches jobs: selects a launcher, builds its command, supervises it, and restarts it. Does not import torch."""
