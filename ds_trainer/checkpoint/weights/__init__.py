"""Weights as the ecosystem knows them: safetensors, their index, adapters."""
