"""What ranks exchange, against accelerate's own functions and plain arithmetic; what cannot work ends in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.utils import operations

from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.parallel.attention import use_sharding
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.utils.errors import ConfigError
from tests.accelerator.support import accelerator, trainer_for
from tests.support.models import tiny_llama
from tests.support.pool import pool


def nest(rank: int) -> dict[str, Any]:
    """Equal shapes on all ranks, several types, a 0-d tensor inside."""
    return {
        "a": torch.arange(6.0).view(2, 3) + 10 * rank,
        "b": [torch.tensor(rank), (torch.tensor([rank > 0]), torch.full((1, 2), rank, dtype=torch.bfloat16))],
    }


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)
    return type(found) is type(wanted) and all(same(a, b) for a, b in zip(found, wanted, strict=True))


def compare_with_accelerate() -> dict[str, bool]:
    ours = accelerator()
    ours.join_group()  # one rank of a launcher; without any, accelerate leaves 0-d tensors as they are
    data = nest(ours.process_index)
    floats = {"a": data["a"], "c": (torch.tensor(1.5 + ours.process_index),)}
    ragged = torch.ones(2, 2 + ours.process_index) * (1 + ours.process_index)
    results = {
        "gather": same(ours.gather(data), operations.gather(data)),
        "even metrics": same(ours.gather_for_metrics(data), operations.gather(data)),
        "objects": ours.gather_for_metrics(["x", ours.process_index])
        == operations.gather_object(["x", ours.process_index]),
    }
    for how in ("sum", "mean", "none"):
        results[how] = same(ours.reduce(floats, how), operations.reduce(floats, how))
    for first in (False, True):
        reference = operations.pad_across_processes(ragged, dim=1, pad_index=-100, pad_first=first)
        results[f"pad {first}"] = same(ours.pad_across_processes(ragged, 1, -100, first), reference)
        reference = operations.pad_across_processes(ragged, dim=-1)
        results["pad from the end"] = same(ours.pad_across_processes(ragged, -1), reference)
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_the_operations_give_what_accelerate_gives(world: int) -> None:
    for results in pool(world).run(compare_with_accelerate):
        assert all(results.values()), results


def gathered_values() -> dict[str, Any]:
    ours = accelerator()
    rank = ours.process_index
    return {
        "gather": ours.gather(torch.tensor([rank, 7])).tolist(),
        "scalar": ours.gather(torch.tensor(rank)).tolist(),
        "sum": float(ours.reduce(torch.tensor(rank + 1.0))),
        "mean": float(ours.reduce(torch.tensor(rank + 1.0), reduction="mean")),
        "max": [leaf.tolist() for leaf in ours.reduce([torch.tensor([rank, -rank]), torch.tensor(rank)], "max")],
        "padded": ours.pad_across_processes(torch.ones(1 + rank), pad_index=9).tolist(),
    }


def test_collectives_of_two_ranks() -> None:
    first, second = pool(2).run(gathered_values)
    common = {"gather": [0, 7, 1, 7], "scalar": [0, 1], "sum": 3.0, "mean": 1.5, "max": [[1, 0], 1]}
    assert first == {**common, "padded": [1, 9]} and second == {**common, "padded": [1, 1]}


def values_under_a_layout(sizes: dict[str, int], sharded: bool) -> dict[str, Any]:
    """What a rank contributes: the number of its replica, or of its rank if sequences are sharded."""
    ours = trainer_for(tiny_llama(), **sizes).accelerator
    layout, rank = ours._layout, ours.process_index
    coordinates = layout.coordinates(rank)
    ours.join_group()
    plan = SequencePlan(layout, layout.length_multiple) if sharded else None
    with use_sharding(plan, parallel_groups(layout)):
        value = float(rank - coordinates.tp if sharded else coordinates.dp)
        rows = torch.full((1 + coordinates.dp, 2), value)
        with ours.split_between_processes(list("abcde")) as split:
            pass
        return {
            "gather": ours.gather(torch.tensor([value])).tolist(),
            "scalar": ours.gather(torch.tensor(value)).tolist(),
            "metrics": ours.gather_for_metrics(rows)[:, 0].tolist(),
            "objects": ours.gather_for_metrics([f"{coordinates.dp}"] * (1 + coordinates.dp)),
            "sum": float(ours.reduce(torch.tensor(value + 1))),
            "mean": float(ours.reduce(torch.tensor(value + 1), "mean")),
            "max": float(ours.reduce(torch.tensor(value + 1), "max")),
            "part": split,
        }


@pytest.mark.parametrize("axis", ["tensor", "context", "sequence"])
def test_each_replica_contributes_once(axis: str) -> None:
    """Two replicas of two ranks. If all four contributed, sums would be twice as large and rows would repeat."""
    found = pool(4).run(values_under_a_layout, {f"{axis}_parallel_size": 2}, False)
    for rank, answer in enumerate(found):
        assert answer.pop("part") == [["a", "b", "c"], ["d", "e"]][rank // 2]
        assert answer == {
            "gather": [0, 1],
            "scalar": [0, 1],
            "metrics": [0, 1, 1],
            "objects": ["0", "1", "1"],
            "sum": 3,
            "mean": 1.5,
            "max": 2,
        }


def test_ranks_with_different_tokens_all_contribute() -> None:
    sizes = {"sequence_parallel_size": 2, "tensor_parallel_size": 2}
    for answer in pool(4).run(values_under_a_layout, sizes, True):
        assert answer["gather"] == [0, 2] and answer["metrics"] == [0, 2]
        assert answer["sum"] == 4 and answer["mean"] == 2 and answer["max"] == 3


def test_one_process_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = accelerator()
    monkeypatch.setattr(ours, "_join_ranks", lambda: pytest.fail("joined"))
    data = torch.tensor(3.0)
    assert ours.gather(data).tolist() == [3.0] and ours.gather_for_metrics({"a": data})["a"].tolist() == [3.0]
    assert ours.gather_for_metrics(["a"]) == ["a"] and not ours.check_trigger()
    total = ours.reduce(data)
    assert total.equal(data) and total is not data
    assert ours.pad_across_processes(data) is data
    ours.wait_for_everyone()


# -- unequal shapes ----------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    ours = accelerator()
    rank = ours.process_index
    cases: dict[str, Any] = {
        "rows": lambda: ours.gather(torch.ones(2 + rank, 3)),
        "types": lambda: ours.gather([torch.ones(2, dtype=torch.float32 if rank else torch.int64)]),
        "lengths": lambda: ours.gather([torch.ones(1)] * (1 + rank)),
        "reduce": lambda: ours.reduce({"x": torch.ones(2 + rank)}),
        "columns": lambda: ours.gather_for_metrics(torch.ones(2, 3 + rank)),
        "dimensions": lambda: ours.pad_across_processes(torch.ones([1] * (1 + rank))),
    }
    messages = {}
    for name, case in cases.items():
        try:
            case()
        except ConfigError as error:
            messages[name] = str(error)
    assert ours.gather(torch.tensor([rank])).tolist() == [0, 1]  # the ranks are in step afterwards
    return messages


def test_unequal_shapes_are_one_error_on_all_ranks_that_names_them() -> None:
    first, second = pool(2).run(refusals)
    assert first == second
    assert first["rows"] == (
        "accelerator.gather: the tensors differ between ranks. rank 0: [2, 3] float32; rank 1: [3, 3] float32. "
        "Use gather_for_metrics, or pad_across_processes first."
    )
    assert "rank 0: [2] int64; rank 1: [2] float32" in first["types"]
    assert "rank 0: [1] float32; rank 1: [1] float32, [1] float32" in first["lengths"]
    assert "accelerator.reduce" in first["reduce"] and "rank 1: [3] float32" in first["reduce"]
    assert "rank 0: [:, 3] float32; rank 1: [:, 4] float32" in first["columns"]
    assert "rank 0: 1 dimensions float32; rank 1: 2 dimensions float32" in first["dimensions"]


def test_reduce_rejects_options_that_accelerate_would_ignore() -> None:
    ours = accelerator()
    with pytest.raises(ConfigError, match="XLA only"):
        ours.reduce(torch.ones(1), scale=0.5)
    with pytest.raises(ConfigError, match="reduction='avg'"):
        ours.reduce(torch.ones(1), reduction="avg")


# -- gather_for_metrics ------------------------------------------------------------------------------------------


def ragged() -> dict[str, Any]:
    ours = accelerator()
    rank = ours.process_index
    rows = torch.arange(3 - 2 * rank).view(-1, 1) + 10 * rank  # three rows, and one
    found: dict[str, Any] = {
        "rows": ours.gather_for_metrics(rows).flatten().tolist(),
        "nest": [t.flatten().tolist() for t in ours.gather_for_metrics((rows, rows[:1] > 5))],
        "empty here": ours.gather_for_metrics(rows[: 3 * (1 - rank)]).flatten().tolist(),
        "empty everywhere": list(ours.gather_for_metrics(rows[:0]).shape),
        "objects": ours.gather_for_metrics(["r"] * (2 - 2 * rank)),
        "as objects": len(ours.gather_for_metrics([rows], use_gather_object=True)),
        "one rank has objects": ours.gather_for_metrics([] if rank else ["only"]),
    }
    with ours.batch(DummyBatch(x=rows) if rank else {"x": rows}):
        found["dummy"] = ours.gather_for_metrics(rows).flatten().tolist()
        found["dummy scalar"] = ours.gather_for_metrics(torch.tensor(rank + 5)).tolist()
        found["dummy objects"] = ours.gather_for_metrics([rank])
        found["gathered in a batch"] = ours.gather(rows).flatten().tolist()
    with ours.batch({"x": rows}):
        found["gathered, ragged"] = [t.flatten().tolist() for t in ours.gather((rows, rows[:1] + 1))]
    found["afterwards"] = ours.gather_for_metrics(torch.tensor(rank + 5)).tolist()
    return found


def test_metrics_are_gathered_exactly() -> None:
    for found in pool(2).run(ragged):
        assert found == {
            "rows": [0, 1, 2, 10],
            "nest": [[0, 1, 2, 10], [False, True]],
            "empty here": [0, 1, 2],
            "empty everywhere": [0, 1],
            "objects": ["r", "r"],
            "as objects": 2,
            "one rank has objects": ["only"],
            "dummy": [0, 1, 2],
            "dummy scalar": [5],
            "dummy objects": [0],
            "gathered in a batch": [0, 1, 2],
            "gathered, ragged": [[0, 1, 2, 10], [1, 11]],
            "afterwards": [5, 6],
        }


def read_evaluation(samples: int, stop_after: int) -> tuple[list[float], list[float]]:
    """The labels of an evaluation set, gathered batch by batch; and what is gathered after leaving a loader early."""
    from tests.accelerator.support import trainer_for
    from tests.support.models import Regression, regression_rows

    rows = regression_rows(samples)
    trainer = trainer_for(Regression(), per_device_eval_batch_size=2)
    join_ranks(trainer.args)
    loader = trainer.get_eval_dataloader(rows)
    seen = [trainer.accelerator.gather_for_metrics(batch["labels"]) for batch in loader]
    for index, _ in enumerate(loader):
        if index == stop_after:
            break
    del loader
    after = trainer.accelerator.gather_for_metrics(torch.tensor(1.0 + trainer.accelerator.process_index))
    return torch.cat(seen).tolist(), after.tolist()


@pytest.mark.parametrize("samples", [4, 5, 7])
def test_a_loop_over_the_evaluation_loader_sees_every_sample_once_in_order(samples: int) -> None:
    from tests.support.models import regression_rows

    labels = [float(row["labels"]) for row in regression_rows(samples)]
    for found, after in pool(2).run(read_evaluation, samples, samples // 4):
        assert found == pytest.approx(labels)
        assert after == [1.0, 2.0]


def read_prepared(samples: int) -> tuple[list[float], int]:
    ours = accelerator()
    loader = ours.prepare(torch.utils.data.DataLoader(torch.arange(float(samples)), batch_size=2))  # type: ignore[arg-type]
    seen = [ours.gather_for_metrics(batch) for batch in loader]
    return torch.cat(seen).tolist(), len(loader)


@pytest.mark.parametrize("samples", [5, 6, 7, 8])
def test_a_prepared_loader_is_sharded_and_repeated_samples_are_dropped(samples: int) -> None:
    for found, length in pool(2).run(read_prepared, samples):
        assert found == list(range(samples)) and length == 2


def trigger() -> list[bool]:
    ours = accelerator()
    answers = [ours.check_trigger()]
    if ours.is_last_process:
        ours.set_trigger()
    return [*answers, ours.check_trigger(), ours.check_trigger()]


def test_a_trigger_on_one_rank_is_seen_by_all() -> None:
    assert pool(2).run(trigger) == [[False, True, False]] * 2
