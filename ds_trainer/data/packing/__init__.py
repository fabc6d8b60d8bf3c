"""Sample packing: rows of ``max_length`` tokens from samples of any length."""
