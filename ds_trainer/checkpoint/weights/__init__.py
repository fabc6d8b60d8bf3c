"""Weights in Hugging Face formats: safetensors files, their index, and adapters."""
