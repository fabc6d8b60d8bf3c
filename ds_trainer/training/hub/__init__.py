"""The Hugging Face Hub: the repository of a run, background pushes, and the model card."""
