"""How a checkpoint comes to be valid, stays so, and is found: files, manifests, locks, retention."""
