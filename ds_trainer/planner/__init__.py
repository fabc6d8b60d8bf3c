"""What fits and how fast: pure arithmetic on the model's shape."""
