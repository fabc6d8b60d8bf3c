"""A training begins with the weights of the model's files, or it does not begin."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.loading.file_weights import FileWeights
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

UP = "model.layers.1.mlp.up_proj.weight"


def changed(path: Path, to: Path, change: Any) -> Path:
    shutil.copytree(path, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and one of whose weights the files call by another name than transformers knows."""
    to = tmp_path_factory.mktemp("models")
    tiny_llama().save_pretrained(to / "good")
    changed(to / "good", to / "renamed", lambda tensors: tensors.update({UP.replace("up", "upp"): tensors.pop(UP)}))
    return to


def loaded(path: Path, under_zero_init: bool = False) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    deepspeed_config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    kept = HfDeepSpeedConfig(deepspeed_config) if under_zero_init else None
    try:
        model = AutoModelForCausalLM.from_pretrained(path)
    finally:
        unset_hf_deepspeed_config()
        del kept
    assert any(hasattr(parameter, "ds_id") for parameter in model.parameters()) is under_zero_init
    return model


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def trainer_of(model: Any, output_dir: str, **arguments: Any) -> Trainer:
    values: dict[str, Any] = dict(max_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True)
    args = TrainingArguments(output_dir, **{**values, **arguments})
    return Trainer(model, args, train_dataset=RaggedTokens(16), eval_dataset=RaggedTokens(4))


def outcome(trainer: Trainer, what: str = "train") -> tuple[str, Any, list[str]]:
    """What comes of a training or an evaluation: the header's words, the error, the warnings."""
    logger, warnings = logging.getLogger("ds_trainer.training.loading.weight_check"), Warnings()
    logger.addHandler(warnings)
    try:
        getattr(trainer, what)()
    except ConfigError as error:
        return "refused", str(error), warnings.messages
    finally:
        logger.removeHandler(warnings)
        if trainer._ds_trainer.engines.training_or_none is not None:
            trainer._ds_trainer.engines.close()
    return str(trainer._ds_trainer.engines.weight_check.summary).split(" (")[0], None, warnings.messages


GOOD = "verified, 21 of 21 tensors, 0 missing, 0 unexpected"


CASES = ((0, "auto"), (3, "auto"), (3, "always"), (3, "never"))


def policies(files: Path, output_dir: str) -> dict[str, Any]:
    found = {}
    for stage, mode in CASES:
        for name in ("good", "renamed"):
            options = {"zero_stage": stage, "verify_weights": mode}
            found[f"whole {stage} {mode} {name}"] = outcome(trainer_of(loaded(files / name), output_dir, **options))
    for name in ("good", "renamed"):
        model = loaded(files / name, under_zero_init=True)
        found[f"zero.Init {name}"] = outcome(trainer_of(model, output_dir, zero_stage=3))
        model = loaded(files / name, under_zero_init=True)
        found[f"zero.Init {name} evaluated"] = outcome(trainer_of(model, output_dir, zero_stage=3), "evaluate")
    path = str(files / "good")
    found["by name"] = outcome(trainer_of(path, output_dir, zero_stage=3))
    fill = FileWeights.fill
    FileWeights.fill = displaced  # type: ignore[method-assign]
    try:
        found["by name, displaced"] = outcome(trainer_of(path, output_dir, zero_stage=3))
    finally:
        FileWeights.fill = fill  # type: ignore[method-assign]
    return found


def displaced(self: FileWeights, name: str, shard_slice: Any, target: Any) -> None:
    """A reader with a fault: every shard begins one element too late."""
    full = load_file(self.directory / "model.safetensors")[name].flatten().roll(-1)
    target.copy_(full[shard_slice.start : shard_slice.stop])


def test_the_weight_check_raises_only_if_users_cannot_have_changed_the_weights(files: Path, tmp_path: Path) -> None:
    first, second = pool(2).run(policies, files, str(tmp_path))
    renamed = "not verified, 20 of 21 tensors, 1 missing, 1 unexpected"
    for stage in (0, 3):
        assert first[f"whole {stage} auto good"] == (GOOD, None, [])
        message, _, (warning,) = first[f"whole {stage} auto renamed"]
        assert message == renamed and UP in warning and "verify_weights='always'" in warning
        assert second[f"whole {stage} auto renamed"] == (renamed, None, [])  # one warning, not one for each rank
    assert first["whole 3 always good"] == (GOOD, None, [])
    for name in ("good", "renamed"):
        assert first[f"whole 3 never {name}"] == ("None", None, [])
    for found in (first, second):
        message, error, _ = found["whole 3 always renamed"]
        assert message == "refused" and f"{UP} (nearest in the files: {UP.replace('up', 'upp')})" in error
    for found in (first, second):
        assert found["by name"] == (GOOD, None, [])
        message, error, _ = found["by name, displaced"]
        assert message == "refused" and "model.embed_tokens.weight (rank 1)" in error
        for what in ("", " evaluated"):
            assert found[f"zero.Init good{what}"] == (GOOD, None, [])
            message, error, _ = found[f"zero.Init renamed{what}"]
            assert message == "refused" and UP in error and "random" in error and "allow_new_weights" in error


def histories(files: Path, output_dir: str) -> dict[str, Any]:
    """Models that are not what their files hold because they were trained, created again, or replaced."""
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    model = loaded(files / "good")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found["first"] = outcome(trainer_of(model, output_dir, verify_weights="always"))
    assert re.search(rf"weights +{re.escape(GOOD)} \(", printed.getvalue())  # the header
    found["again"] = outcome(trainer_of(model, output_dir, verify_weights="always"))
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(files / "good"))
    found["from a config"] = outcome(trainer_of(fresh, output_dir, verify_weights="always"))
    found["no transformers"] = outcome(trainer_of(tiny_llama(), output_dir, verify_weights="always"))
    saving = {"save_strategy": "steps", "save_steps": 1, "verify_weights": "always", "learning_rate": 0.1}
    found["saved"] = outcome(trainer_of(loaded(files / "good"), f"{output_dir}/run", **saving))
    resumed = trainer_of(loaded(files / "good"), f"{output_dir}/run", **saving, auto_resume=True)
    found["resumed"] = outcome(resumed)
    named = {"start_from_weights": str(files / "good"), "verify_weights": "always"}
    found["restarted"] = outcome(trainer_of(tiny_llama(seed=5), output_dir, **named))
    from_pieces = {"start_from_weights": f"{output_dir}/run/checkpoint-1", "verify_weights": "always"}
    found["restarted from pieces"] = outcome(trainer_of(tiny_llama(seed=5), output_dir, **from_pieces))
    return found


def test_only_weights_from_files_are_compared(files: Path, tmp_path: Path) -> None:
    (found,) = pool(1).run(partial(histories, files, str(tmp_path)))
    nothing = ("None", None, [])
    assert found == {
        "first": (GOOD, None, []),
        "again": nothing,
        "from a config": nothing,
        "no transformers": nothing,
        "saved": (GOOD, None, []),
        "resumed": nothing,
        "restarted": (GOOD, None, []),
        "restarted from pieces": nothing,
    }
