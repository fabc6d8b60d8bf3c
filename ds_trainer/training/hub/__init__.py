"""The Hugging Face Hub: the repository of a run, what is pushed to it in the background, and its model card."""
