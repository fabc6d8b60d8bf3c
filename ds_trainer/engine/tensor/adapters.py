"""LoRA layers under tensor parallelism: the adapter is cut as the layer that it belongs to.

Of a column-parallel layer ``W x`` each rank has some outputs, so it has those rows of ``B`` in ``W x + B A x``, and all
of ``A``; of a row-parallel one it has some inputs, so it has those columns of ``A``, and all of ``B``. DeepSpeed itself
takes a LoRA layer for a plain one and would drop the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def is_lora(module: Any) -> bool:
    """Whether ``module`` is peft's LoRA around a plain linear layer, without anything that needs whole weights."""
    return (
        type(module).__module__ == "peft.tuners.lora.layer"
        and type(getattr(module, "base_layer", None)) is nn.Linear
        and not any(module.use_dora.values())
        and not any(isinstance(dropout, nn.Dropout) and dropout.p > 0.0 for dropout in module.lora_dropout.values())
    )


@contextmanager
def lora_is_cut() -> Iterator[None]:
    """While DeepSpeed cuts a model, LoRA layers are cut with what they wrap."""
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
        # The name decides how many heads a rank gets: the same one for all parts.
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
