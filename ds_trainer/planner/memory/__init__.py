"""Memory of a rank: what it holds at which moment of a run."""
