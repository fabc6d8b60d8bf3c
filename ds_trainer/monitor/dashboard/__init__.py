"""The dashboard of a run: curves, speed, memory and ranks in a terminal, read from the files of the run."""
