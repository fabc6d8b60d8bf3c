"""Background saves: copies of the state are written while training continues."""
