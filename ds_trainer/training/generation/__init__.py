"""Generation in evaluation: its configuration and padding."""
