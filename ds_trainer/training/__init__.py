"""What ties it together: the Trainer, its loops, the loss rule, the main job."""
