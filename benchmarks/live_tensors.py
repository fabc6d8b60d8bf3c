"""Bytes of the tensors that exist in a process, as the planner's probe counts them."""

from ds_trainer.planner.activations.live_tensors import LiveTensors

__all__ = ["LiveTensors"]
