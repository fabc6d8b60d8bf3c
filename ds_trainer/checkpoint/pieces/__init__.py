"""What a checkpoint holds: pieces of tensors by place, random states, the engine's own progress."""
