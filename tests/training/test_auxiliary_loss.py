"""A router's auxiliary loss counts once: the mean of the micro-batches' own terms, weighted with their items."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from ds_trainer import Trainer
from tests.support.compare import assert_equal, distances
from tests.support.experts import COEFFICIENT, FAMILIES, mixtral, step_loss
from tests.support.models import RaggedTokens
from tests.support.oracle import Trajectory, stack, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

SAMPLES, GLOBAL_BATCH = 32, 16
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0}

make_data = partial(RaggedTokens, SAMPLES)


def equal(micro: int, samples: int) -> list[int]:
    return [micro] * (samples // micro)


@cache
def reference(family: str, micro: int) -> Trajectory:
    """``micro``: samples of a micro-batch."""
    loss = partial(step_loss, sizes=partial(equal, micro))
    return train_plainly(FAMILIES[family](), make_data(), loss=loss, optimizer="sgd", learning_rate=0.3)


def run(output_dir: Any, world: int, make_model: Any = mixtral, **arguments: Any) -> list[Trajectory]:
    job = partial(train_and_report, make_model, arguments.pop("data", make_data), str(output_dir))
    return pool(world).run(partial(job, arguments.pop("trainer_class", Trainer), **{**SGD, **arguments}))


def sizes(world: int, accumulation: int) -> dict[str, int]:
    micro = GLOBAL_BATCH // (world * accumulation)
    return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}


PLACES = [
    (1, 0, 1), (1, 1, 2), (1, 2, 8), (1, 3, 8), (2, 0, 2), (2, 1, 8), (2, 2, 1), (2, 3, 2), (4, 0, 1), (4, 1, 2),
    (4, 2, 2), (4, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize(("world", "stage", "accumulation"), PLACES)
def test_trajectory_is_that_of_one_process(world: int, stage: int, accumulation: int, tmp_path: Any) -> None:
    """Loss, gradient norm and weights after four steps, at every stage and number of ranks and micro-batches."""
    arguments = {**sizes(world, accumulation), "zero_stage": stage}
    wanted = reference("mixtral", arguments["per_device_train_batch_size"])
    for found in run(tmp_path, world, **arguments):
        assert_equal(found, wanted)


# -- sequences that are cut: every rank's part is a micro-batch for the router ---------------------------------------


def long_data() -> list[dict[str, torch.Tensor]]:
    """Sequences of 16 tokens whose last 5 at least are padding: cut in four, a rank has nothing but padding."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(SAMPLES):
        used = int(torch.randint(4, 12, (), generator=generator))
        mask = (torch.arange(16) < used).long()
        tokens = torch.randint(3, 61, (16,), generator=generator) * mask
        rows.append({"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask})
    return rows


PARTS = {
    "cp2": [[*range(0, 4), *range(12, 16)], [*range(4, 12)]],
    "sp2": [[*range(0, 8)], [*range(8, 16)]],
    "sp4": [[*range(0, 4)], [*range(4, 8)], [*range(8, 12)], [*range(12, 16)]],
    "cp2 x sp2": [[*range(0, 4)], [*range(12, 16)], [*range(4, 8)], [*range(8, 12)]],
    "dp2 x sp2": [[*range(0, 8)], [*range(8, 16)]],
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("name", "cp", "sp", "dp"),
    [("cp2", 2, 1, 1), ("sp2", 1, 2, 1), ("sp4", 1, 4, 1), ("cp2 x sp2", 2, 2, 1), ("dp2 x sp2", 1, 2, 2)],
)
def test_cut_sequences(name: str, cp: int, sp: int, dp: int, stage: int, tmp_path: Any) -> None:
    """The mean over the parts of all ranks; a part that holds nothing but padding counts for nothing."""
    loss = partial(step_loss, sizes=partial(equal, 4), parts=PARTS[name])
    wanted = train_plainly(mixtral(), long_data(), loss=loss, optimizer="sgd", learning_rate=0.3)
    arguments = {"context_parallel_size": cp, "sequence_parallel_size": sp, "zero_stage": stage}
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4 // dp}
    for found in run(tmp_path, dp * cp * sp, data=long_data, **arguments, **batch):
        assert_equal(found, wanted)


# -- the two parts, families, ragged batches -------------------------------------------------------------------------


def first_loss(output_dir: Any, world: int, accumulation: int, coefficient: float) -> float:
    arguments = {**sizes(world, accumulation), "zero_stage": 1, "max_steps": 1}
    return run(output_dir, world, partial(mixtral, coefficient), **arguments)[0].losses[0]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 8), (2, 1), (2, 8), (4, 1), (4, 4)])
def test_both_parts_of_the_loss(world: int, accumulation: int, tmp_path: Any) -> None:
    """The cross-entropy is the same in all layouts; the rest is the weighted mean of the micro-batches' terms."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(42)).tolist()[:GLOBAL_BATCH]
    data, model = make_data(), mixtral()
    micro, batches = GLOBAL_BATCH // (world * accumulation), []
    for begin in range(0, GLOBAL_BATCH, micro):
        batches.append(stack([data[index] for index in order[begin : begin + micro]]))
    with torch.no_grad():
        terms = [float(model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).aux_loss) for b in batches]
        whole = float(model(**stack([data[index] for index in order])).loss)
        whole -= COEFFICIENT * float(model(**stack([data[index] for index in order])).aux_loss)
    items = [int(b["labels"][:, 1:].ne(-100).sum()) for b in batches]
    wanted = sum(n * term for n, term in zip(items, terms, strict=True)) / sum(items)
    entropy = first_loss(tmp_path, world, accumulation, 0.0)
    assert entropy == pytest.approx(whole, rel=1e-5)
    auxiliary = first_loss(tmp_path, world, accumulation, COEFFICIENT) - entropy
    assert auxiliary == pytest.approx(COEFFICIENT * wanted, rel=1e-4)  # a difference of two losses 20 times as large
    if micro == 1:
        assert abs(sum(terms) / len(terms) - wanted) > 1e-3  # so that the weights matter


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mixtral"])
def test_families(family: str, tmp_path: Any) -> None:
    for world, accumulation in ((1, 8), (2, 4)):
        for found in run(tmp_path, world, FAMILIES[family], **sizes(world, accumulation), zero_stage=2):
            assert_equal(found, reference(family, 2))


RAGGED = {37: [1, 1, 1, 2], 35: [1, 1, 1]}  # micro-batches of the last step of an epoch


def dealt(samples: int) -> list[int]:
    """Four replicas with two micro-batches of 2 each; of the last 3 samples of an epoch, one of them gets none."""
    return [2] * 8 if samples == GLOBAL_BATCH else RAGGED[samples + 32]


@pytest.mark.parametrize(("samples", "stage"), [(37, 0), (35, 0), (35, 3)])
def test_fillers_and_ragged_batches_count_by_their_items(samples: int, stage: int, tmp_path: Any) -> None:
    data, loss = partial(RaggedTokens, samples), partial(step_loss, sizes=dealt)
    wanted = train_plainly(mixtral(), data(), loss=loss, optimizer="sgd", learning_rate=0.3)
    for found in run(tmp_path, 4, data=data, **sizes(4, 2), zero_stage=stage):
        assert_equal(found, wanted)
