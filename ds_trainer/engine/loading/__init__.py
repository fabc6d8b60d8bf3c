"""Loads and initializes weights directly into the shards of an engine, for models larger than one device."""
