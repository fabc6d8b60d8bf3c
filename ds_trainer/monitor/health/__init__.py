"""Health of a run: hangs, stragglers, divergence."""
