"""The loss of a linear head without the logits of a whole sequence (``loss_chunk_tokens``, ``z_loss_factor``)."""
