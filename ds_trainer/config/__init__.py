"""Compiles arguments, layout and model shape into one DeepSpeed configuration."""
