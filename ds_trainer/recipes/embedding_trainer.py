"""``EmbeddingTrainer``: sentence-transformers' trainer, whose evaluation does not depend on the number of ranks.

Import it after this package's classes are in the place of transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.util.distributed import all_gather, all_gather_with_grad, get_world_size
from torch.utils.data import DataLoader


class EmbeddingTrainer(SentenceTransformerTrainer):
    """Every rank evaluates all held-out samples.

    The library's own loader of several ranks drops samples or repeats some, and these are negatives of the others. Its
    evaluators encode all texts on every rank, too.
    """

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """All samples, in batches of ``per_device_eval_batch_size``."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return DataLoader(dataset, batch_size=self.args.per_device_eval_batch_size, collate_fn=self.data_collator)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The same, with the number of samples of one rank."""
        with _without_gathering(self.loss):
            output = super().evaluation_loop(*args, **kwargs)
        items = f"{kwargs.get('metric_key_prefix', 'eval')}_items"
        if items in output.metrics:
            output.metrics[items] //= self.args.world_size
        return output


def gathering(loss_class: Any) -> Any:
    """``loss_class``, which compares the pairs of a batch with each other, with those of all ranks.

    Args:
        loss_class: CoSENTLoss or a subclass of it.
    """

    class Gathering(loss_class):
        gather_across_devices = True

        def compute_loss_from_embeddings(self, embeddings: list[Any], labels: Any) -> Any:
            if self.gather_across_devices and get_world_size() > 1:
                embeddings = [all_gather_with_grad(vectors.contiguous()) for vectors in embeddings]
                labels = all_gather(labels.contiguous())
            return super().compute_loss_from_embeddings(embeddings, labels)

    Gathering.__name__ = Gathering.__qualname__ = loss_class.__name__  # the model card names it
    return Gathering


@contextmanager
def _without_gathering(loss: Any) -> Iterator[None]:
    """Inside, the negatives of a text are those of its own batch: all ranks have the same one."""
    before = getattr(loss, "gather_across_devices", False)
    if before:
        loss.gather_across_devices = False
    try:
        yield
    finally:
        if before:
            loss.gather_across_devices = before
