"""The parts of the training loop: run plan, optimizer step, loss, batches."""
