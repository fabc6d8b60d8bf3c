"""What the user asks for: plain data, checked as a whole, imports neither torch nor deepspeed."""
