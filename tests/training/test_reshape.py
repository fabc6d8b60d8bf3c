"""Saved on one layout, resumed on any other: the next losses are those of the run that was never stopped.

Nine layouts. By default each is resumed in its own layout and in two others; ``-m matrix`` runs the other 54 pairs. The
samples are the right ones: a global batch is the same set of rows everywhere, and a run with another global batch goes
on with the sample that comes next.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import ConfigError, Trainer, TrainingArguments
from tests.support.compare import weight_distance
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.resuming import record_batches
from tests.support.runs import compatibility_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank, ZeRO 0": {"world": 1, "zero_stage": 0},
    "1 rank, ZeRO 2": {"world": 1, "zero_stage": 2},
    "dp 2, ZeRO 1": {"world": 2, "zero_stage": 1},
    "dp 2, ZeRO 3": {"world": 2, "zero_stage": 3},
    "tp 2, ZeRO 0": {"world": 2, "zero_stage": 0, "tensor_parallel_size": 2},
    "sp 2, ZeRO 1": {"world": 2, "zero_stage": 1, "sequence_parallel_size": 2},
    "cp 2, ZeRO 3": {"world": 2, "zero_stage": 3, "context_parallel_size": 2},
    "dp 4, ZeRO 2": {"world": 4, "zero_stage": 2},
    "dp 2, tp 2, ZeRO 3": {"world": 4, "zero_stage": 3, "tensor_parallel_size": 2},
}
PAIRS = list(product(LAYOUTS, LAYOUTS))
_NAMES = list(LAYOUTS)
CHOSEN = {(_NAMES[index], _NAMES[(index + shift) % len(_NAMES)]) for index in range(len(_NAMES)) for shift in (0, 1, 4)}
STOP, STEPS, BATCH = 2, 4, 8


def trainer_of(layout: str, output_dir: str, batch: int = BATCH, **arguments: Any) -> Trainer:
    sizes = dict(LAYOUTS[layout])
    replica = 1
    for axis in ("tensor", "context", "sequence"):
        replica *= sizes.get(f"{axis}_parallel_size", 1)
    dp = sizes.pop("world") // replica
    values: dict[str, Any] = dict(
        learning_rate=1e-2,
        weight_decay=0.1,
        adam_epsilon=1e-5,  # tiny gradients have a sign that rounding decides
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=batch // dp,
    )
    args = TrainingArguments(output_dir, **{**values, **sizes, **arguments})
    return Trainer(tiny_llama(initializer_range=0.06), args, train_dataset=RaggedTokens(60))


def run(layout: str, output_dir: str, resume: str | None = None, **arguments: Any) -> Any:
    """Trajectory and the rows that reached this rank's model."""
    trainer = trainer_of(layout, output_dir, **arguments)
    batches = record_batches(trainer)
    trainer.train(resume_from_checkpoint=resume)
    found = compatibility_of(trainer)
    trainer.engine.close()
    return found, batches


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reshape")


@cache
def unbroken(layout: str, base: Path) -> Any:
    """The run of one layout, which leaves a checkpoint in the middle."""
    ranks = pool(LAYOUTS[layout]["world"])
    saving = {"save_strategy": "steps", "save_steps": STOP}
    return ranks.run(partial(run, layout, str(base / layout), **saving))[0][0]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("old", "new"),
    [pytest.param(*pair, marks=[] if pair in CHOSEN else pytest.mark.matrix) for pair in PAIRS],
    ids=lambda name: name.replace(" ", "-"),
)
def test_every_layout_resumes_from_every_other(old: str, new: str, base: Path, tmp_path: Path) -> None:
    wanted = unbroken(old, base)
    checkpoint = str(base / old / f"checkpoint-{STOP}")
    for found, _ in pool(LAYOUTS[new]["world"]).run(partial(run, new, str(tmp_path), checkpoint)):
        assert len(found.losses) == STEPS
        assert found.losses[STOP:] == pytest.approx(wanted.losses[STOP:], rel=0, abs=1e-6)
        assert found.grad_norms[STOP:] == pytest.approx(wanted.grad_norms[STOP:], rel=2e-6)
        assert found.learning_rates == wanted.learning_rates
        assert weight_distance(found.weights, wanted.weights) < 1e-5


def test_control_a_lost_optimizer_moment_is_detected(base: Path, tmp_path: Path) -> None:
    """Negative control: without the optimizer's states the next losses are others."""
    wanted = unbroken("dp 2, ZeRO 1", base)
    checkpoint = str(base / "dp 2, ZeRO 1" / f"checkpoint-{STOP}")
    ((found, _),) = pool(1).run(run_without_states, "1 rank, ZeRO 0", str(tmp_path), checkpoint)
    assert found.losses[STOP] == pytest.approx(wanted.losses[STOP], abs=1e-6)  # the same weights
    assert abs(found.losses[STOP + 1] - wanted.losses[STOP + 1]) > 1e-4


def run_without_states(layout: str, output_dir: str, checkpoint: str) -> Any:
    from ds_trainer.checkpoint.shards.shard_source import ShardSource

    kept = ShardSource.fill

    def without(self: Any, name: str, kind: str, shard_slice: Any, target: Any) -> None:
        if kind != "exp_avg":
            kept(self, name, kind, shard_slice, target)

    ShardSource.fill = without  # type: ignore[method-assign]
    try:
        return run(layout, output_dir, checkpoint)
    finally:
        ShardSource.fill = kept  # type: ignore[method-assign]


# -- another global batch --------------------------------------------------------------------------------------------


def rows_of(batches: list[list[int]]) -> list[tuple[int, ...]]:
    length = RaggedTokens(1)[0]["input_ids"].numel()
    return [tuple(batch[start : start + length]) for batch in batches for start in range(0, len(batch), length)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("old", "before", "new", "now"),
    [
        ("dp 2, ZeRO 1", 8, "dp 4, ZeRO 2", 12),
        ("dp 4, ZeRO 2", 12, "1 rank, ZeRO 0", 8),
        ("tp 2, ZeRO 0", 8, "dp 2, ZeRO 3", 10),
    ],
)
def test_another_batch_size_skips_and_repeats_nothing(
    old: str, before: int, new: str, now: int, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": STOP, "max_steps": STOP, "lr_scheduler_type": "constant"}
    first = pool(LAYOUTS[old]["world"]).run(partial(run, old, str(tmp_path), batch=before, **saving))
    longer = {"max_steps": -1, "num_train_epochs": 1, "lr_scheduler_type": "constant"}
    checkpoint = str(tmp_path / f"checkpoint-{STOP}")
    changed = {**longer, "batch": now}
    second = pool(LAYOUTS[new]["world"]).run(partial(run, new, str(tmp_path / "new"), checkpoint, **changed))
    rows = [row for _, batches in (*first, *second) for row in dict.fromkeys(rows_of(batches))]
    data = sorted(tuple(row["input_ids"].tolist()) for row in RaggedTokens(60))
    assert sorted(set(rows)) == data
    replicas = 2 if "tp" in old else 1  # ranks of a replica see the same rows
    assert len(rows) == STOP * before * replicas + 60 - STOP * before
    assert len(second[0][0].losses) == STOP + -(-(60 - STOP * before) // now)


def test_strict_resume_rejects_another_batch_size(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "lr_scheduler_type": "constant"}
    pool(2).run(partial(run, "dp 2, ZeRO 1", str(tmp_path), **saving))
    message = pool(1).run(refusal, "1 rank, ZeRO 0", str(tmp_path), str(tmp_path / "checkpoint-1"))[0]
    assert (
        "global_batch was 8" in message and "is 4" in message and "allow_changed_on_resume=['global_batch']" in message
    )


def refusal(layout: str, output_dir: str, checkpoint: str) -> str:
    try:
        run(layout, output_dir, checkpoint, batch=4, lr_scheduler_type="constant", strict_resume=True)
    except ConfigError as error:
        return str(error)
    raise AssertionError("was not refused")


def test_layouts_match_their_names() -> None:
    assert len(LAYOUTS) >= 8 and {sizes["world"] for sizes in LAYOUTS.values()} == {1, 2, 4}
    assert len(PAIRS) == len(LAYOUTS) ** 2
