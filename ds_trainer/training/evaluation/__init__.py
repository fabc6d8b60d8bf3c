"""Evaluation and prediction: the loop over a loader, the exact mean loss, and the predictions of all ranks."""
