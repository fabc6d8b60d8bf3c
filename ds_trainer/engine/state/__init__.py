"""What an engine knows, as named pieces of whole tensors: read for a checkpoint, put back into any layout."""
