"""What goes in: sources, collators, the order of samples, loaders."""
