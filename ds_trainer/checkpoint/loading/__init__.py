"""Partial reads of a model directory's weight files: each rank reads only the elements that it will hold."""
