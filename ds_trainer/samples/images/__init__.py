"""Images of samples: read and checked, as tokens of a text, and as inputs of a model."""
