"""Layout arithmetic: the coordinates of every rank and the samples that it holds. Needs no process group."""
