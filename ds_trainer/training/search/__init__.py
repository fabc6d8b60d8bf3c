"""Hyperparameter search: trials, their arguments, their execution on all ranks, and the search backends."""
