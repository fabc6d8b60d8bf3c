"""Input data: collators, columns, the order of samples, samplers, loaders and streams."""
