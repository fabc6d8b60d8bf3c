"""Bytes of the tensors that exist in a process, as the planner's probe counts them."""

from ds_trainer.planner.activations.device_probe import LiveTensors

__all__ = ["LiveTensors"]
