"""How the weights of a model that is too large for one device get into the shards of an engine."""
