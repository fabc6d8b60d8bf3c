"""Tensor parallelism: whether a model can be cut, the cut by DeepSpeed's AutoTP, and what that leaves to be done."""
