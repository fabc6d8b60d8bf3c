"""Modules that act on each token alone, run on a few tokens at a time: MLPs and norms."""
