"""Which layouts a model supports, its FLOPs, and device speeds: pure arithmetic on the model's shape."""
