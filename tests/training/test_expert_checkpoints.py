"""Checkpoints do not depend on the ranks that divide experts: resumed and exported as those of any other layout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_trainer import Trainer, TrainingArguments
from tests.support.checkpoints import resume as resume_from
from tests.support.compare import weight_distance
from tests.support.expert_models import maker
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import compatibility_of
from tests.training.test_expert_parallel import BATCH, samples

STOP, STEPS = 2, 4


def run(
    ranks: int, experts: int, stage: int, output_dir: str, resume: str | None = None, **arguments: Any
) -> Trajectory:
    """A run with AdamW; it leaves a checkpoint in the middle and the model at the end."""
    given: dict[str, Any] = dict(
        zero_stage=stage,
        expert_parallel_size=experts,
        per_device_train_batch_size=BATCH // ranks,
        learning_rate=1e-2,
        adam_epsilon=1e-5,  # tiny gradients have a sign that rounding decides
        logging_steps=1,
        save_strategy="steps",
        save_steps=STOP,
        max_steps=STEPS,
        disable_tqdm=True,
        use_cpu=True,
        self_test="never",
    )
    args = TrainingArguments(output_dir, **{**given, **arguments})
    trainer = Trainer(maker("qwen3_moe")(), args, train_dataset=samples())
    trainer.train(resume_from_checkpoint=resume)
    if resume is None:
        trainer.save_model(str(Path(output_dir, "final")))
    report = compatibility_of(trainer)
    trainer.engine.close()
    return report


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trajectory]:
    """Two ranks that divide the experts, at ZeRO 1."""
    directory = tmp_path_factory.mktemp("experts")
    return directory, pool(2).run(partial(run, 2, 2, 1, str(directory)))[0]


@pytest.mark.parametrize(
    ("ranks", "experts", "stage"), [(2, 2, 1), (2, 1, 3), (1, 1, 0), (4, 4, 2), (4, 2, 3)], ids=str
)
def test_resumed_with_other_ranks(ranks: int, experts: int, stage: int, first: Any, tmp_path: Path) -> None:
    directory, wanted = first
    checkpoint = str(directory / f"checkpoint-{STOP}")
    found = pool(ranks).run(partial(run, ranks, experts, stage, str(tmp_path), checkpoint, save_strategy="no"))[0]
    assert found.losses[STOP:] == pytest.approx(wanted.losses[STOP:], rel=0, abs=1e-6)
    assert found.grad_norms[STOP:] == pytest.approx(wanted.grad_norms[STOP:], rel=2e-6)
    same = (ranks, experts, stage) == (2, 2, 1)
    assert weight_distance(found.weights, wanted.weights) <= (0 if same else 1e-6)


def test_the_saved_model_is_that_of_transformers(first: Any) -> None:
    import transformers

    directory, wanted = first
    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "final")
    assert weight_distance({name: p.detach() for name, p in model.named_parameters()}, wanted.weights) == 0
    assert model.config._experts_implementation != "ds_trainer_expert_parallel"
    with torch.no_grad():
        model(torch.arange(1, 9)[None])


def flip(shards: list[Path], where: str) -> None:
    """One bit in the middle of a tensor of experts, or of the router."""
    data = bytearray(shards[1].read_bytes())
    size = int.from_bytes(data[:8], "little")
    entries = {name: entry["data_offsets"] for name, entry in json.loads(data[8 : 8 + size]).items() if where in name}
    first, last = next(offsets for offsets in entries.values() if offsets[1] > offsets[0])
    data[8 + size + (first + last) // 2] ^= 1
    shards[1].write_bytes(data)


def swap(shards: list[Path]) -> None:
    kept = shards[0].read_bytes()
    shards[0].write_bytes(shards[1].read_bytes())
    shards[1].write_bytes(kept)


DAMAGE: dict[str, Callable[[list[Path]], Any]] = {
    "a bit of an expert": lambda shards: flip(shards, "experts"),
    "a bit of a router": lambda shards: flip(shards, "gate"),
    "missing": lambda shards: shards[1].unlink(),
    "swapped": swap,
    "of another step": lambda shards: shards[1].write_bytes(
        (shards[1].parents[1] / f"checkpoint-{STOP}" / shards[1].name).read_bytes()
    ),
    "cut": lambda shards: os.truncate(shards[0], shards[0].stat().st_size - 1),
    "empty": lambda shards: shards[0].write_bytes(bytes(shards[0].stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_experts_are_not_resumed_from(damage: str, first: Any, tmp_path: Path) -> None:
    run = shutil.copytree(first[0], tmp_path / "run")
    newest = run / f"checkpoint-{STEPS}"
    assert resume_from(run)[0].path == newest
    shards = sorted(newest.glob("rank_*.safetensors"))
    assert len(shards) == 2
    DAMAGE[damage](shards)
    assert resume_from(run)[0].path == run / f"checkpoint-{STOP}"


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made on this device."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if _is_real(one)}
        for tensor in filter(_is_real, tree_leaves(made)):
            # Views of a file that is mapped into memory are no copies of it: a rank reads a part.
            if tensor.untyped_storage().data_ptr() not in given and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return made


SIZES: dict[str, Any] = dict(num_experts=64, num_hidden_layers=1, moe_intermediate_size=256, hidden_size=128)
ALL = 64 * 2 * 256 * 128
"""Elements of the first projections of all experts of a layer."""


def _load(directory: str, stage: int, experts: int) -> tuple[int, dict[str, torch.Tensor], float, int]:
    """The largest tensor of a run from files, the weights that it has read, its first loss, bytes read by all ranks."""
    arguments: dict[str, Any] = dict(zero_stage=stage, expert_parallel_size=experts, max_steps=1, learning_rate=0.0)
    arguments |= dict(use_cpu=True, save_strategy="no", self_test="never", logging_steps=1)
    trainer = Trainer(directory, TrainingArguments(f"{directory}/run", **arguments), train_dataset=samples())
    assert all(parameter.is_meta for parameter in trainer.model.parameters())
    with Largest() as largest:
        read = trainer.train().metrics["load_bytes_read"]
    report = compatibility_of(trainer)
    trainer.engine.close()
    return largest.elements, report.weights, report.losses[0], read


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", ["each expert", "stacked", "bin"])
def test_no_rank_holds_all_experts(form: str, stage: int, tmp_path: Path) -> None:
    model = maker("qwen3_moe", **SIZES)()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if form == "each expert":
        model.save_pretrained(tmp_path)
    else:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if form == "bin":
            torch.save(state, tmp_path / "pytorch_model.bin")
        else:
            save_file(state, str(tmp_path / "model.safetensors"), {"format": "pt"})
    whole = pool(4).run(_load, str(tmp_path), stage, 1)
    assert whole[0][0] >= ALL  # so it would be noticed
    divided = pool(4).run(_load, str(tmp_path), stage, 4)
    for largest, found, loss, read in divided:
        assert read == sum(weight.nbytes for weight in weights.values())  # by one rank each
        assert weight_distance(found, weights) == 0
        assert loss == pytest.approx(whole[0][2], rel=1e-6)
        assert largest < ALL / 2
