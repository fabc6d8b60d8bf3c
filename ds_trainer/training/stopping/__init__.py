"""Stopping early and losing nothing: signals, stop files, time limits, and how ranks agree to act on them."""
