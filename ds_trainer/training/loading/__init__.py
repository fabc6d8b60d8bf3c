"""Resolves model references: a directory or Hub name becomes a model on meta and its weight source."""
