"""Models that are named instead of handed in: a directory or hub name becomes a model on meta and its weight source."""
