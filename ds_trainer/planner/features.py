"""Features that save activations (:data:`~ds_trainer.planner.candidate.FEATURES`): which are worth trying together."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

from ds_trainer.planner import candidate
from ds_trainer.planner.candidate import CHUNK_TOKENS, Candidate
from ds_trainer.planner.planned_model import PlannedModel


def feature_sets(model: PlannedModel, run: Candidate, fixed: Collection[str]) -> list[tuple[str, ...]]:
    """Sets of features that ``run`` could have in addition: none, all that have an effect, then fewer to more.

    If the second does not fit, no other does. Of the rest, one that has less costs less time.

    Args:
        model: what is trained.
        run: how.
        fixed: fields of ``run`` that are given.
    """
    useful = [name for name in candidate.SEARCHED_FEATURES if name not in fixed and _has_effect(model, run, name)]
    if not useful:
        return [()]
    between = [chosen for number in range(1, len(useful)) for chosen in combinations(useful, number)]
    return [(), tuple(useful), *between]


def _has_effect(model: PlannedModel, run: Candidate, name: str) -> bool:
    if name == "chunked_loss":
        return model.rows > 0 and run.tokens > CHUNK_TOKENS
    if name == "tiled_mlp":
        return model.stack.intermediate_size > 0 and run.tokens > model.stack.hidden_size
    return run.checkpointing
