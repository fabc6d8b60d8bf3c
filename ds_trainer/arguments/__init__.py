"""The options of a run: plain data, checked together, without importing torch or deepspeed."""
