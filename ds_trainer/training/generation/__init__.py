"""Generation in evaluation: how it is configured, padded, and made the same on all ranks of a replica."""
