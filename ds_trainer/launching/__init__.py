"""Starting a training: which launcher, with which words, and what became of it. Imports no torch."""
