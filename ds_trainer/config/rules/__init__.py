"""Combinations that DeepSpeed or this project cannot run: one row each, by topic.

The rows are input of tests and printed as the support matrix in the documentation.
"""

from __future__ import annotations

from ds_trainer.config.rules.case import Case, Rule
from ds_trainer.config.rules.library_optimizers import LIBRARY_OPTIMIZERS
from ds_trainer.config.rules.offload_engines import OFFLOAD_ENGINES
from ds_trainer.config.rules.optimizers import OPTIMIZERS
from ds_trainer.config.rules.precision import PRECISION
from ds_trainer.config.rules.tensor import TENSOR
from ds_trainer.config.rules.trainer import TRAINER
from ds_trainer.config.rules.zero import ZERO

__all__ = ["RULES", "Case", "Rule", "broken_rules"]

RULES: tuple[Rule, ...] = (*PRECISION, *ZERO, *OFFLOAD_ENGINES, *OPTIMIZERS, *LIBRARY_OPTIMIZERS, *TENSOR, *TRAINER)


def broken_rules(case: Case) -> list[str]:
    """A sentence for each rule that ``case`` breaks."""
    return [rule.sentence(case) for rule in RULES if rule.broken(case)]
