"""A name that means no model, and models that are damaged or are another one: one error in words, on every rank."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import ConfigError, Trainer, TrainingArguments
from tests.support.pool import pool
from tests.support.saved_models import saved


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def _cut(path: Path, kept: int) -> None:
    path.write_bytes(path.read_bytes()[:kept])


def _rewrite(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _as_bin(directory: Path, content: Any) -> None:
    (directory / "model.safetensors").unlink()
    torch.save(content, directory / "pytorch_model.bin")


def _another_name_in_the_index(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    _rewrite(index, weight_map={**names, "lm_head.weight": "model-9.safetensors"})


def _entry_without_offsets(directory: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def _without_type(directory: Path) -> None:
    """The type of the weights is then that of the files, which have to be opened for it."""
    config = json.loads((directory / "config.json").read_text())
    config.pop("dtype")
    (directory / "config.json").write_text(json.dumps(config))


# What is done to a saved model, whether it has several files, and what the error says.
Damage = Callable[[Path], Any]
CASES: dict[str, tuple[Damage, bool, str]] = {
    "no config.json": (lambda d: (d / "config.json").unlink(), False, r"there is no config.json in .*Pass the dir"),
    "a config.json that is cut off": (lambda d: _cut(d / "config.json", 9), False, "json cannot be loaded: .*JSON"),
    "no model_type": (
        lambda d: (d / "config.json").write_text("{}"), False, "config.json cannot be loaded: .*`model_type`"
    ),
    "an unknown model_type": (lambda d: _rewrite(d / "config.json", model_type="lama9"), False, "loaded: .*`lama9`"),
    "a depth": (lambda d: _rewrite(d / "config.json", num_hidden_layers=10**9), False, "=1,000,000,000, but the files"),
    "a list of types": (lambda d: _rewrite(d / "config.json", model_type=["llama"]), False, "cannot be loaded"),
    **{
        f"hidden_size {size!r}": (
            lambda d, size=size: _rewrite(d / "config.json", hidden_size=size), False, "config.json(: a Llama| can)"
        )
        for size in (-4, "x", 10**15)
    },
    "a class of another architecture": (
        lambda d: _rewrite(d / "config.json", architectures=["BertForMaskedLM"]), False,
        "model_type llama, but its architectures entry BertForMaskedLM is for bert models. Correct one"
    ),
    "another architecture": (
        lambda d: _rewrite(d / "config.json", architectures=["BertForMaskedLM"], model_type="bert"), False,
        "has no weights for 44 tensors of BertForMaskedLM.*the directory belongs to another model"
    ),
    "another size": (lambda d: _rewrite(d / "config.json", hidden_size=64), False, "shapes differ from Llama"),
    "a damaged generation_config.json": (
        lambda d: (d / "generation_config.json").write_text("{"), False, "config.json cannot be loaded: .*remove"
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), False, "found none of model.safetensors, "),
    "a missing shard file": (
        lambda d: (d / "model-00001-of-00005.safetensors").unlink(), True,
        r"index.json lists 5 files, 1 of which are missing: model-00001-of-00005.safetensors. Copy or download"
    ),
    "an index with a wrong name": (
        _another_name_in_the_index, True, r"lists \d files, 1 of which are missing: model-9.safetensors"
    ),
    "an index that is cut off": (
        lambda d: _cut(d / "model.safetensors.index.json", 50), True, r"is not valid JSON \(.*Copy or download"
    ),
    "an index that is a list": (
        lambda d: (d / "model.safetensors.index.json").write_text("[]"), True, "index.json is not a weight index"
    ),
    "a file that is cut off": (
        lambda d: _cut(d / "model.safetensors", 79692), False,
        "has 79692 bytes, but its header requires 79792: it is truncated or damaged. Copy or download"
    ),
    "a file that is cut off, and no type": (
        lambda d: (_cut(d / "model.safetensors", 70000), _without_type(d)), False, "has 70000 bytes, but its"
    ),
    "a shard file that is cut off": (
        lambda d: _cut(d / "model-00002-of-00005.safetensors", 999), True, "00002-of-00005.safetensors .* damaged"
    ),
    "a file that is cut off in its header": (
        lambda d: _cut(d / "model.safetensors", 100), False, "is not a safetensors file, or is damaged: a header of"
    ),
    "an empty file": (lambda d: _cut(d / "model.safetensors", 0), False, "damaged: a header of 0 bytes in a file of 0"),
    "a header without offsets": (_entry_without_offsets, False, "its header has no location for a. Copy or download"),
    "a pickle that runs code": (
        lambda d: _as_bin(d, {"a": Malicious(d / "ran"), "b": torch.ones(3)}), False,
        "pytorch_model.bin contains more than tensors and plain values: posix.system can run code .*was not run"
    ),
    "a pickle that runs code, and no type": (
        lambda d: (_as_bin(d, {"a": Malicious(d / "ran"), "b": torch.ones(3)}), _without_type(d)), False, "posix.sys"
    ),
    "an old pickle that runs code": (
        lambda d: ((d / "model.safetensors").unlink(),
                   (d / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(d / "ran")))),
        False, "pytorch_model.bin is damaged, or in the format of torch before 1.6"
    )
}  # fmt: skip

NAMES = {
    "{root}/an empty fil": r"is not a directory \(working directory: .*Did you mean '.*/an empty file'.*repository",
    "./modles/llama": r"'./modles/llama' is not a directory \(working directory: .*Pass the directory of a saved",
    "me/llama": r"'me/llama' is not a directory .*the cache .* does not contain.*OFFLINE.*`hf download me/llama`",
    "{root}": r"there is no config.json in .* Its subfolders .* contain one. Pass the directory",
    "{root}/no weights/config.json": "is a file. Pass the directory that contains it",
}


def refusal(given: str, output_dir: str) -> str:
    args = TrainingArguments(output_dir, use_cpu=True, zero_stage=3, report_to=[])
    with pytest.raises(ConfigError) as refused:
        Trainer(model=given, args=args)
    return str(refused.value)


def refusals(given: list[str], output_dir: str) -> list[str]:
    return [refusal(one, output_dir) for one in given]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every damaged model in a directory with the name of the case."""
    found = tmp_path_factory.mktemp("models")
    for case, (damage, several, _) in CASES.items():
        saved("llama", found / case, **({"max_shard_size": "20KB"} if several else {}))
        damage(found / case)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_model_is_rejected(case: str, root: Path, tmp_path: Path) -> None:
    message = refusal(str(root / case), str(tmp_path))
    assert re.search(CASES[case][2], message), message
    assert str(root / case) in message and not (root / case / "ran").exists()


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_model_name_is_rejected(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    message = refusal(name.format(root=root), str(tmp_path))
    assert re.search(NAMES[name], message), message


def test_every_rank_reports_the_error_and_ends(root: Path, tmp_path: Path) -> None:
    """Two ranks say the same of every one; none waits for the other."""
    given = [str(root / case) for case in CASES] + ["./modles/llama", f"{root}/gone"]
    first, second = pool(2).run(refusals, given, str(tmp_path))
    assert first == second
    assert len(first) == len(given) and not list(root.glob("*/ran"))
