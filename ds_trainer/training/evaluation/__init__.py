"""Evaluation and prediction: the loop over a loader, the exact mean loss, what all ranks predicted."""
