"""The callback protocol, its state and control, the default callbacks, and the experiment trackers."""
