"""LoRA layers under tensor parallelism: partitions an adapter like the layer that it belongs to.

A rank holds some outputs of a column-parallel layer ``W x``, so in ``W x + B A x`` it needs those rows of ``B`` and all
of ``A``. It holds some inputs of a row-parallel layer, so it needs those columns of ``A`` and all of ``B``. DeepSpeed
itself treats a LoRA layer as a plain linear layer and would drop the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def is_lora(module: Any) -> bool:
    """Whether ``module`` is peft's LoRA around a plain linear layer, without features that need full weights."""
    return (
        type(module).__module__ == "peft.tuners.lora.layer"
        and type(getattr(module, "base_layer", None)) is nn.Linear
        and not any(module.use_dora.values())
        and not any(isinstance(dropout, nn.Dropout) and dropout.p > 0.0 for dropout in module.lora_dropout.values())
    )


@contextmanager
def partition_lora_layers() -> Iterator[None]:
    """Inside, DeepSpeed partitions LoRA layers together with the layers that they wrap."""
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import PartitionType

    original = AutoTP._replace_with_config

    def replace(cutter: Any, child: Any, name: str) -> Any:
        if not is_lora(child):
            return original(cutter, child, name)
        spec = cutter.partition_config.find_matching_spec(f"{name}.weight", cutter._get_model_type())
        if spec is None or spec.partition_type == PartitionType.SKIP:
            return child
        by_row = spec.partition_type == PartitionType.ROW
        make = cutter._create_row_parallel_layer if by_row else cutter._create_column_parallel_layer
        adapters = child.lora_A if by_row else child.lora_B
        # The name determines the number of heads per rank, so all parts use the same one.
        for owner, part in ((child, "base_layer"), *((adapters, key) for key in adapters)):
            layer = owner._modules[part]
            cutter._gather_zero3_params(layer)
            owner._modules[part] = make(layer, spec, name)
        child.replaced = True
        return child

    AutoTP._replace_with_config = replace
    try:
        yield
    finally:
        AutoTP._replace_with_config = original
