"""The save protocol: how a checkpoint is written, published, found, verified and removed."""
