"""From a checkpoint on disk to weights, without an engine."""
