"""Memory of activations: bytes per token as formulas in the dimensions of a layer."""
