"""Whether a run is well: does it get on, who holds the others up, are its numbers sound."""
