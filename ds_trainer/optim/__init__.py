"""Optimizers and schedules: parameter groups, the optimizer of a compiled configuration, learning-rate schedules."""
