"""Weights from the files of a model: read into an engine, and compared with what it holds."""
