"""Early stops without lost work: signals, stop files, time limits, and how ranks agree to act on them."""
