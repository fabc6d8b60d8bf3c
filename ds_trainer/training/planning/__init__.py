"""The planner in a run: the predicted memory and step time, the memory check, ``parallelism="auto"``."""
