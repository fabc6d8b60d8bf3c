"""Is the training all right: what is looked at while it runs."""
