"""Combinations that DeepSpeed or this package cannot run: one row each, by topic.

Tests iterate over the rows, and the documentation prints them as the support matrix.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ds_trainer.config.compiled import WatchedConfig
from ds_trainer.config.rules.optimizer_rules import LIBRARY_OPTIMIZERS, OPTIMIZERS
from ds_trainer.config.rules.precision_rules import PRECISION
from ds_trainer.config.rules.rule_context import Rule, RuleContext
from ds_trainer.config.rules.trainer_rules import TRAINER
from ds_trainer.config.rules.zero_rules import OFFLOAD_ENGINES, TENSOR, ZERO

__all__ = ["RULES", "Rule", "RuleContext", "broken_rules"]

RULES: tuple[Rule, ...] = (*PRECISION, *ZERO, *OFFLOAD_ENGINES, *OPTIMIZERS, *LIBRARY_OPTIMIZERS, *TENSOR, *TRAINER)


def broken_rules(context: RuleContext, uncertain: Collection[str] = ()) -> list[Rule]:
    """The broken rules, without those that ask for a value at or below a path in ``uncertain``."""
    broken = []
    for rule in RULES:
        config = WatchedConfig(context.config)
        if rule.broken(replace(context, config=config)) and not config.has_read(uncertain):
            broken.append(rule)
    return broken
