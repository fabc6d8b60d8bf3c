"""Prepared datasets: samples tokenized once, in memory-mapped shards that are found again by their content."""
