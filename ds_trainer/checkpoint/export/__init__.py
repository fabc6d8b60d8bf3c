"""Exports and inspects checkpoints on disk, without an engine."""
