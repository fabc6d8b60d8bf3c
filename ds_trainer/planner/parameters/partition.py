"""What tensor parallelism (DeepSpeed's AutoTP) partitions of a model that was read as a module."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ds_trainer.planner.parameters.groups import ParameterGroup

_ROW = re.compile(
    r"(?:^|\.)(?:o|wo|Wo|w2|o_proj|out_proj|down_proj|c_proj|fc2|fc_out|out_lin|lin2|dense_4h_to_h|output\.dense|"
    r"attention\.dense)\.bias$"
)
"""Biases of layers whose inputs are partitioned: every rank adds them, as a whole, to the sum."""


def with_partition(groups: Iterable[ParameterGroup], has_plan: bool) -> tuple[ParameterGroup, ...]:
    """``groups`` with the dimension that is partitioned.

    Those are the linear layers of attention and MLP, the biases of layers whose outputs are partitioned, embeddings
    inside of layers (relative positions), and with a plan the LM head. Which dimension of a matrix it is makes no
    difference to sizes.

    Args:
        groups: parameters without adapters.
        has_plan: the model has a plan for tensor parallelism; otherwise layers are found by their names.
    """
    return tuple(replace(group, split=_split(group, has_plan)) for group in groups)


def has_tensor_parallel_plan(model: Any) -> bool:
    """Whether a transformers model says what to partition (``_tp_plan``, ``base_model_tp_plan``)."""
    config = getattr(model, "config", None)
    plans = (getattr(config, "base_model_tp_plan", None), getattr(type(model), "_tp_plan", None))
    return any(isinstance(plan, dict) and plan for plan in plans)


def _split(group: ParameterGroup, has_plan: bool) -> int | None:
    if len(group.shape) == 2:
        if group.kind == "head":
            return 0 if has_plan and group.name.endswith("lm_head.weight") else None
        if group.kind == "embedding":
            return None if group.stack is None else 1
        return 0 if group.kind in ("attention", "mlp") and group.stack is not None else None
    is_bias = group.stack is not None and group.kind in ("attention", "mlp") and group.name.endswith("bias")
    return 0 if is_bias and len(group.shape) == 1 and not _ROW.search(group.name) else None
