"""Every key that is accepted, in a training on 2 ranks: DeepSpeed's engine has the value, or a sentence names the key.

The engine's configuration, parameter groups and schedule are compared with those of the same run without the key. A
value that the engine does not have must have been refused, or named as one without effect.
"""

from __future__ import annotations

import contextlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.config.schema import Field, load_schema
from ds_trainer.utils.errors import ConfigError
from tests.config.support import nested, recorded
from tests.config.test_file_and_run import COMPARED, LEAVES, a_value
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

SCHEMA = load_schema()
RAW = ("_param_dict", "optimizer_params", "scheduler_params")  # what the file says, whether or not it is used
ON_HOST = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "zero_force_ds_cpu_optimizer": False}
ENABLED = ("csv_monitor", "tensorboard", "flops_profiler", "comms_logger", "torch_autocast")
# Values other than those that a run without the key has, where the schema does not tell.
VALUES: dict[str, Any] = {
    "checkpoint.tag_validation": "Fail",
    "comms_logger.prof_ops": ["all_reduce"],
    "fp16.hysteresis": 3,
    "tensor_parallel.partition_config": {
        "layer_specs": [
            {"patterns": [".*(up|gate)_proj\\.weight$"], "partition_type": "column"},
            {"patterns": [".*down_proj\\.weight$"], "partition_type": "row"},
        ]
    },
    "timers.throughput.enabled": True,
    "zero_optimization.leaf_module.names": ["lm_head"],
    "zero_optimization.leaf_module.name_suffixes": ["lm_head"],
    "zero_optimization.offload_optimizer.pin_memory": True,
    "zero_optimization.offload_param.pin_memory": True,
    "zero_optimization.overlap_comm": False,  # at stages 1 and 2 it decides when buckets are sent, not by DeepSpeed
    "zero_optimization.stage": 2,
}
# Of the length of a vocabulary, DeepSpeed logs whether tensor cores like it; a wandb run needs a server.
ELSEWHERE = ("vocabulary_size", "wandb.")


def setting(path: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Arguments and a file without ``path`` in which DeepSpeed would read it."""
    block, *below = path.split(".")
    if block == "zero_optimization" and below[0].startswith("offload_"):
        stages = (2, 3) if below[0] == "offload_optimizer" else (3,)
        device = {} if below[1] == "device" else {below[0]: {"device": "cpu"}}
        return [({}, {**ON_HOST, "zero_optimization": {"stage": stage, **device}}) for stage in stages]
    if block == "zero_optimization" and below != ["stage"]:
        stages = (3,) if below[0].startswith(("stage3", "overlap_comm")) else (1, 3)
        return [({}, {"zero_optimization": {"stage": stage}}) for stage in stages]
    if block in ENABLED and below != ["enabled"]:
        return [({}, {block: {"enabled": True}})]
    switches = {
        "activation_checkpointing": {"activation_checkpointing": True},
        "bf16": {} if below == ["enabled"] else {"bf16": True},
        "tensor_parallel": {"tensor_parallel_size": 2},
    }
    return [(switches.get(block, {}), {"csv_monitor": {}} if block == "csv_monitor" else {})]


def merged(file: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {
        **file,
        **{key: merged(file.get(key, {}), value) if isinstance(value, dict) else value for key, value in more.items()},
    }


def reported(directory: str, arguments: dict[str, Any], file: dict[str, Any]) -> tuple[str, list[str]]:
    """What this rank's engine reports after a training, and what was said; nothing of an engine if it was refused."""
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    values = {"max_steps": 2, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    with contextlib.chdir(place), recorded() as said:
        try:
            args = TrainingArguments("out", deepspeed=file, **values, **arguments)
            trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(32, seed=1))
            trainer.train()
        except ConfigError as error:
            return "", error.problems
    engine = trainer.engine.deepspeed
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    schedule = {key: value for key, value in getattr(engine.lr_scheduler, "__dict__", {}).items() if key != "optimizer"}
    config = {key: getattr(value, "__dict__", value) for key, value in vars(engine._config).items() if key not in RAW}
    trainer.engine.close()
    return re.sub(r" at 0x\w+", "", f"{config} {groups} {schedule}"), said


@cache
def run(directory: Path, arguments: str, file: str) -> list[tuple[str, list[str]]]:
    return pool(2).run(reported, str(directory), json.loads(arguments), json.loads(file))


def problem(place: Path, arguments: dict[str, Any], file: dict[str, Any], path: str, value: Any) -> str | None:
    """What is wrong where ``file`` has ``value`` at ``path`` too; None if nothing is."""
    given = json.dumps(arguments)
    before = run(place.parent, given, json.dumps(file))
    after = run(place, given, json.dumps(merged(file, nested(path, value))))
    assert all(report for report, _ in before), before
    said = [text for _, texts in after for text in texts]  # ranks other than the first say little
    named = any(path.partition(".")[0] in text and path.rpartition(".")[2] in text for text in said)
    if not named and any(report in ("", plain) for (report, _), (plain, _) in zip(after, before, strict=True)):
        return f"{path}={value!r} beside {file} and {arguments}: {said or 'DeepSpeed has the same values'}"
    return None


KEYS = [(path, field) for path, field in LEAVES if path not in COMPARED and not path.startswith(ELSEWHERE)]
BLOCKS = sorted({path.partition(".")[0] for path, _ in KEYS})


@pytest.mark.extended
@pytest.mark.parametrize("block", BLOCKS)
def test_the_engine_has_every_accepted_key(block: str, tmp_path: Path) -> None:
    wrong = []
    for path, field in KEYS:
        for arguments, file in setting(path) if path.partition(".")[0] == block else ():
            value = VALUES.get(path, a_value(path, field))
            wrong.append(problem(tmp_path / f"{len(wrong)}", arguments, file, path, value))
    assert [text for text in wrong if text] == []


@pytest.mark.extended
@pytest.mark.parametrize("name", SCHEMA.types["scheduler"])
def test_the_schedule_has_every_parameter(name: str, tmp_path: Path) -> None:
    fields = SCHEMA.types["scheduler"][name].fields
    needed = {"total_num_steps": 2} if "total_num_steps" in fields else {}
    needed |= {"cycle_min_lr": 1e-6, "cycle_max_lr": 1e-4} if name == "OneCycle" else {}
    file = {"scheduler": {"type": name, "params": needed}}
    wrong = [
        problem(tmp_path / key, {}, file, f"scheduler.params.{key}", other(field)) for key, field in fields.items()
    ]
    assert [text for text in wrong if text] == []


def other(field: Field) -> Any:
    """A value of a parameter that is not its default."""
    if field.choices:
        return next(choice for choice in field.choices if choice != field.default)
    if isinstance(field.default, bool):
        return not field.default
    return {"int": 3, "float": 0.25, "str": "linear"}.get(field.kind, True)


@pytest.mark.extended
def test_a_key_that_the_engine_does_not_have_is_noticed(tmp_path: Path) -> None:
    """The comparison itself, with a key that has no effect and a warning that does not name it."""
    assert "same values" in str(problem(tmp_path / "0", {}, {}, "train_micro_batch_size_per_gpu", 8))
