"""Modules that run on a few tokens at a time."""
