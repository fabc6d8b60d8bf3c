"""Checkpoints of adapters: without the base, which is known by a digest, and of which another one is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ds_trainer import Trainer
from ds_trainer.checkpoint.weights.base_digest import BaseDigest
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common
from ds_trainer.utils.errors import ConfigError
from tests.checkpoint.weights.test_adapter_files import arguments, logits_of, lora_model, make_data
from tests.support.models import tiny_llama
from tests.support.pool import pool

peft = pytest.importorskip("peft")


def partitioned_model() -> Any:
    return lora_model(modules_to_save=None, target_modules=["q_proj", "o_proj"])


def saved(output_dir: Path, cases: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A checkpoint of step 2 for each case; the logits of each live model."""
    logits = {}
    for name, changes in cases.items():
        args = arguments(output_dir / name, save_strategy="steps", save_steps=2, max_steps=2, **CONSTANT, **changes)
        job = Trainer(partitioned_model(), args, train_dataset=make_data())
        job.train()
        if changes.get("tensor_parallel_size", 1) == 1:
            logits[name] = logits_of(job.model_wrapped)
        job.engine.close()
    return logits


CONSTANT = {"lr_scheduler_type": "constant"}
ONE = {"one": {"stage": 0}, "one, 16 bits": {"stage": 2, "bf16": True}}
TWO = {
    "zero 2": {"stage": 2},
    "zero 3": {"stage": 3},
    "tp, zero 1": {"stage": 1, "tensor_parallel_size": 2},
    "tp, zero 3": {"stage": 3, "tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    directory = tmp_path_factory.mktemp("adapters")
    logits = pool(1).run(partial(saved, directory, ONE))[0]
    return directory, {**logits, **pool(2).run(partial(saved, directory, TWO))[0]}


def test_the_digest_is_the_same_in_every_layout(checkpoints: tuple[Path, Any]) -> None:
    directory, _ = checkpoints
    found = {name: BaseDigest.read(directory / name / "checkpoint-2") for name in (*ONE, *TWO)}
    wanted = found["one"]
    names = {name for name, _ in partitioned_model().named_parameters() if "lora" not in name}
    assert wanted is not None and wanted.tensors.keys() == names
    assert all(found[name] == wanted for name in TWO)
    halves = found["one, 16 bits"]
    assert halves is not None and {one[0] for one in halves.tensors.values()} == {"BF16"}


def test_peft_loads_the_live_model(checkpoints: tuple[Path, dict[str, torch.Tensor]]) -> None:
    directory, logits = checkpoints
    for name in ("one", "zero 2", "zero 3"):
        loaded = peft.PeftModel.from_pretrained(tiny_llama(), str(directory / name / "checkpoint-2"))
        assert torch.allclose(logits_of(loaded), logits[name], atol=1e-6)
    assert not torch.allclose(logits_of(partitioned_model()), logits["one"], atol=1e-3), "it has learnt something"


def test_only_trained_weights_are_written(checkpoints: tuple[Path, Any]) -> None:
    directory, _ = checkpoints
    trained = sum(p.numel() for p in partitioned_model().parameters() if p.requires_grad)
    for name in ("one", "zero 3", "tp, zero 3"):
        checkpoint = directory / name / "checkpoint-2"
        files = [load_file(path) for path in checkpoint.glob("rank_*.safetensors")]
        assert sum(tensor.numel() for file in files for tensor in file.values()) == 3 * trained
        adapters = load_file(checkpoint / "adapter_model.safetensors")
        assert sum(tensor.numel() for tensor in adapters.values()) == trained


def resumed(checkpoint: Path, output_dir: Path, changes: dict[str, Any], change: str) -> tuple[str, list[float]]:
    """What a resumed run says and its losses; ``change`` is what is done to the base before."""
    model = partitioned_model()
    with torch.no_grad():
        if change:
            model.get_parameter(change).add_(1e-3)
    job = Trainer(model, arguments(output_dir, max_steps=4, **CONSTANT, **changes), train_dataset=make_data())
    message = ""
    try:
        job.train(resume_from_checkpoint=str(checkpoint))
    except ConfigError as error:
        message = str(error)
    job.engine.close()
    return message, [entry["loss"] for entry in job.state.log_history if "loss" in entry]


def test_a_run_resumes_in_another_layout_but_not_with_another_base(
    checkpoints: tuple[Path, Any], tmp_path: Path
) -> None:
    directory, _ = checkpoints
    checkpoint = directory / "zero 3" / "checkpoint-2"
    (_, wanted) = pool(2).run(resumed, checkpoint, tmp_path, {"stage": 3}, "")[0]
    (message, found) = pool(2).run(resumed, checkpoint, tmp_path, {"stage": 1, "tensor_parallel_size": 2, **SAME}, "")[
        0
    ]
    assert message == "" and len(found) == 4 and found == pytest.approx(wanted, rel=1e-5)
    changed = "base_model.model.model.layers.1.mlp.up_proj.weight"
    for message, _ in pool(2).run(resumed, checkpoint, tmp_path, {"stage": 3}, changed):
        assert f"1 of {len(BaseDigest.read(checkpoint).tensors)} frozen tensors differ" in message  # type: ignore[union-attr]
        assert changed in message and "frozen tensors differ" in message and str(checkpoint) in message


SAME = {"per_device_train_batch_size": 8}  # of two tensor-parallel ranks: the global batch of two replicas


def test_the_message_names_weights_of_another_shape(checkpoints: tuple[Path, Any]) -> None:
    path = checkpoints[0] / "one" / "checkpoint-2"
    digest = BaseDigest.read(path)
    assert digest is not None
    digest.check(digest, path)
    values = json.loads((path / "base.json").read_text())["tensors"]
    first = next(iter(values))
    other = BaseDigest("elsewhere", {**digest.tensors, first: ("BF16", (1, 2), "0")})
    with pytest.raises(ConfigError, match=r"is BF16 \[1, 2\] in the checkpoint, F32"):
        other.check(digest, path)
    with pytest.raises(ConfigError, match="the model of this run has no adapters"):
        digest.check(None, path)


@pytest.mark.parametrize("dim", [None, 0, 1, 2])
def test_sampled_elements_are_found_in_any_slice(dim: int | None) -> None:
    shape = (4, 6, 5)
    bands = () if dim is None else ((1, 1), (3, 1))
    full_slice = ShardSlice(shape, 0, 0, dim, bands)
    shard_slice = full_slice.run(3, full_slice.slice_numel - 2)
    full = torch.arange(120)
    elements = torch.empty(len(shard_slice), dtype=torch.int64)
    copy_common(elements, shard_slice, full, ShardSlice.whole(shape))
    which, where = shard_slice.locate(full)
    assert torch.equal(elements[where], full[which]) and sorted(elements.tolist()) == which.tolist()
