"""What is wrong with a machine, an installation or an allocation, with remedies: before it costs a training."""
