"""Memory of a run, item by item, at each moment that can be the largest."""
