"""Embeddings that tensor parallelism partitions along their width.

Without a plan DeepSpeed partitions embeddings inside layers (T5's relative positions, one column per head). It copies a
slice to the device and back into a new embedding, which is impossible for a weight on the meta device, and an existing
optimizer still refers to the old parameter. Here the parameter object stays the same and its data becomes the slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def partition_embeddings_in_place() -> Iterator[None]:
    """Inside, embeddings that DeepSpeed partitions keep their parameter object."""
    from deepspeed.module_inject.auto_tp import AutoTP

    original = AutoTP._slice_embedding

    def partition(cutter: Any, child: Any, name: str, conv_linear_layer: bool) -> Any:
        tied = {*cutter._tied_row_parallel_embedding_ids}
        if cutter.vocab_parallel_lm_head:
            tied |= {*cutter._tied_vocab_parallel_embedding_ids}
        if getattr(child, "replaced", False) or id(child) in tied:
            return original(cutter, child, name, conv_linear_layer)  # does nothing
        cutter._gather_zero3_params(child)
        _partition(cutter, child, name)
        return child

    AutoTP._slice_embedding = partition
    try:
        yield
    finally:
        AutoTP._slice_embedding = original


def _partition(cutter: Any, embedding: nn.Embedding, name: str) -> None:
    from deepspeed import comm
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
    from deepspeed.module_inject.layers import _build_param_uc_restore_meta
    from deepspeed.module_inject.tp_shard import get_shard_size_list

    weight = embedding.weight
    shape = tuple(weight.shape)
    sizes = get_shard_size_list(shape[1], cutter.mp_size, cutter.tp_meta, name)
    weight.data = weight.data.split(sizes, dim=1)[comm.get_rank(group=cutter.mp_group)]
    embedding.embedding_dim = weight.shape[1]
    meta = _build_param_uc_restore_meta(
        partition_type="row",
        partition_dim=1,
        logical_shape=shape,
        output_shape=shape,
        partition_sizes=sizes,
        target_partition_shape=tuple(weight.shape),
        original_shape=shape,
    )
    setattr(weight, DS_AUTOTP_UC_META, meta)
    embedding.replaced = True  # type: ignore[assignment]  # DeepSpeed's mark of processed modules
