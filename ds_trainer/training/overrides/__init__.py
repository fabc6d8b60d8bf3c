"""What a subclass of the Trainer may override, one file a topic. Each method is really called by the loop."""
