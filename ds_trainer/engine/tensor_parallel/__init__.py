"""Tensor parallelism: checks that a model can be partitioned, and completes the partitioning by DeepSpeed's AutoTP."""
