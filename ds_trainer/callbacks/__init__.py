"""Who is told: the callback protocol, its state and control, and the callbacks that are on by default."""
