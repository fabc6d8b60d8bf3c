"""Converts checkpoints of DeepSpeed and of transformers.Trainer to the native format.

Supported formats: ``engine.save_checkpoint`` at every ZeRO stage (with or without tensor parallelism), DeepSpeed's
universal format, and ``checkpoint-N`` directories of transformers. DeepSpeed's own converter assembles shards into full
tensors in a temporary directory, on the CPU, one shard and one tensor at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_trainer.checkpoint.converters.deepspeed_reader import ConvertedState, UniversalCheckpoint, Zero0Checkpoint
from ds_trainer.checkpoint.converters.transformers_reader import RunningModel, TransformersCheckpoint
from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile, InMemoryFile
from ds_trainer.checkpoint.protocol.file_writer import CheckpointFileWriter
from ds_trainer.checkpoint.protocol.other_formats import (
    CheckpointFormat,
    ConvertibleCheckpoint,
    check_pickles,
    detect_format,
    load_deepspeed_pickle,
)
from ds_trainer.checkpoint.shards.engine_files import CLIENT_STATE_FILE
from ds_trainer.checkpoint.shards.shard_content import ShardContent
from ds_trainer.engine.state.state_shards import StateShard
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import parse_json
from ds_trainer.utils.units import counted

_FILE_BYTES = 2**30  # bytes of state shards per file
_ADAM = {"exp_avg", "exp_avg_sq", "step"}


class ConversionResult(NamedTuple):
    """The result of a conversion.

    Attributes:
        step: number of completed optimizer steps.
        facts: facts about the run that wrote the checkpoint: axis sizes, ZeRO stage, precision.
        notes: messages for the user: what was converted, and what was not.
    """

    step: int
    facts: dict[str, Any]
    notes: list[str]


def other_format_at(path: Path) -> ConvertibleCheckpoint:
    """Returns the checkpoint of DeepSpeed or transformers at ``path``.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    checkpoint = detect_format(path)
    if checkpoint is None:
        raise ConfigError(
            f"{path} is not a DeepSpeed checkpoint: there are no *_model_states.pt files in it or in the directory "
            "named by its file 'latest' or 'latest_universal'. It is not a transformers.Trainer checkpoint either: "
            "there is no trainer_state.json with optimizer.pt or training_args.bin."
        )
    return checkpoint


def write_native(
    checkpoint: ConvertibleCheckpoint,
    files: CheckpointFileWriter,
    trusted: bool,
    running_model: RunningModel | None = None,
) -> ConversionResult:
    """Write all files of a native checkpoint except its manifest to ``files.directory``.

    Args:
        checkpoint: the checkpoint to convert.
        files: the writer of the target directory; DeepSpeed's converter uses a temporary subdirectory of it.
        trusted: unpickle arbitrary objects in the files.
        running_model: the model of the resuming run; required for transformers.Trainer checkpoints without DeepSpeed.

    Raises:
        ConfigError: the checkpoint cannot be converted; the message states the reason.
    """
    check_pickles(checkpoint.files, trusted)
    scratch = files.directory / "universal"
    source = _source_of(checkpoint, scratch, trusted, running_model)
    state = source.state
    for content in _contents(source.state_shards(), state):
        with files.create(content.name) as stream:
            content.write(stream)
    shutil.rmtree(scratch, ignore_errors=True)
    notes: list[str] = []
    schedule = _schedule(checkpoint, state, notes)
    if isinstance(source, TransformersCheckpoint):
        notes += source.notes
        schedule = source.schedule(schedule)
        _write(files, [source.base.to_file()] if source.base is not None else [])
    _write(files, [InMemoryFile.of(CLIENT_STATE_FILE, state.client_state()), InMemoryFile.of("scheduler.pt", schedule)])
    _write(files, _random_states(checkpoint, trusted, notes))
    _write(files, [InMemoryFile("trainer_state.json", _trainer_state(checkpoint, state, notes))])
    return ConversionResult(state.step, _facts(checkpoint, state), notes)


def _write(files: CheckpointFileWriter, contents: Iterable[CheckpointFile]) -> None:
    for content in contents:
        with files.create(content.name) as stream:
            content.write(stream)


# -- engine state ----------------------------------------------------------------------------------------------------


def _source_of(
    checkpoint: ConvertibleCheckpoint, scratch: Path, trusted: bool, running_model: RunningModel | None
) -> UniversalCheckpoint | Zero0Checkpoint | TransformersCheckpoint:
    if checkpoint.format is CheckpointFormat.HF_TRAINER:
        if running_model is None:
            raise ConfigError(
                f"{checkpoint.path} was written by transformers.Trainer without DeepSpeed. Its optimizer state numbers "
                "the parameters without naming them, so only a run with the model can convert it. Resume from it: "
                f"train(resume_from_checkpoint={str(checkpoint.path)!r})."
            )
        return TransformersCheckpoint(checkpoint.path, running_model, trusted)
    if checkpoint.is_universal:
        return UniversalCheckpoint(checkpoint.files, trusted)
    shards = sorted(checkpoint.files.glob("*zero_pp_rank_*_optim_states.pt"))
    if not shards:
        return Zero0Checkpoint(checkpoint.files, trusted)
    _check_convertible(checkpoint.files, shards[0], trusted)
    to_universal(checkpoint.files, scratch / "step")
    return UniversalCheckpoint(scratch / "step", trusted)


def _check_convertible(directory: Path, shard: Path, trusted: bool) -> None:
    """Raise for checkpoints that DeepSpeed's converter would convert incompletely or fail on."""
    if layers := sorted(directory.glob("layer_*")):
        raise ConfigError(
            f"{directory} contains {layers[0].name}: pipeline stages and experts in separate files are not supported."
        )
    if (directory / "offloaded_tensors").is_dir():
        raise ConfigError(
            f"{directory} contains offloaded_tensors: the optimizer states were on NVMe, and DeepSpeed stores them in "
            "their swap format. Load the checkpoint with DeepSpeed in its original layout, and save it without NVMe "
            "offload."
        )
    state = load_deepspeed_pickle(shard, trusted)["optimizer_state_dict"]
    state = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    states = state.get("state") if isinstance(state, dict) else None
    if not states:
        raise ConfigError(f"{shard} contains no optimizer state: no step was made, or elastic_checkpoint is enabled.")
    keys = {key for state_of_parameter in states.values() for key in state_of_parameter}
    if not {"exp_avg", "exp_avg_sq"} <= keys <= _ADAM:
        raise ConfigError(
            f"{shard}: the optimizer states are {', '.join(sorted(keys)) or 'none'}, but DeepSpeed's converter "
            "(ds_to_universal) supports only those of Adam: exp_avg, exp_avg_sq, step. Start a new run from its "
            "weights."
        )


def to_universal(directory: Path, target: Path) -> None:
    """Convert DeepSpeed's shards to its universal format with DeepSpeed's converter, in this process.

    Raises:
        ConfigError: DeepSpeed's converter failed.
    """
    from deepspeed.checkpoint import ds_to_universal

    target.parent.mkdir(parents=True, exist_ok=True)
    options = argparse.Namespace(
        input_folder=str(directory),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    output = io.StringIO()  # discards progress bars
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), _scalars_as_vectors():
            ds_to_universal.main(options)
    except Exception as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ConfigError(
            f"{directory} could not be converted: DeepSpeed's ds_to_universal failed with {type(error).__name__}: "
            f"{str(error) or 'no message'}."
        ) from error


@contextlib.contextmanager
def _scalars_as_vectors() -> Iterator[None]:
    """Give scalar parameters a dimension: DeepSpeed 0.19.8 concatenates parameters, and torch rejects scalars there."""
    from deepspeed.checkpoint import ds_to_universal

    merge = ds_to_universal.merge_tp_slices

    def merged(info: Any, directory: str, slices: str, tp: int, name_and_shapes: tuple[str, Any]) -> Any:
        name, shapes = name_and_shapes
        return merge(info, directory, slices, tp, (name, [tuple(shape) or (1,) for shape in shapes]))

    ds_to_universal.merge_tp_slices = merged
    try:
        yield
    finally:
        ds_to_universal.merge_tp_slices = merge


def _contents(shards: Iterator[StateShard], state: ConvertedState) -> Iterator[ShardContent]:
    """Yields files of about one gigabyte; the tensors of one file are memory-mapped at a time."""
    batch: list[StateShard] = []
    size = count = 0
    for shard in shards:
        batch.append(shard)
        size += shard.tensor.numel() * shard.tensor.element_size()
        if size >= _FILE_BYTES:
            yield _shard_content(count, batch, state)
            batch, size, count = [], 0, count + 1
    if batch:
        yield _shard_content(count, batch, state)


def _shard_content(index: int, shards: list[StateShard], state: ConvertedState) -> ShardContent:
    name = "rank_00000" + (f".{index}" if index else "") + ".safetensors"
    names = {shard.name for shard in shards}
    return ShardContent(name, shards, {name: values for name, values in state.scalars.items() if name in names})


def _facts(checkpoint: ConvertibleCheckpoint, state: ConvertedState) -> dict[str, Any]:
    config = state.model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    stage = config.get("zero_optimization", {}).get("stage", 0)
    precision = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True), "fp32")
    tp = int(state.model.get("mp_world_size") or 1)
    dp = int(state.model.get("dp_world_size") or 1)
    sizes = {"world_size": dp * tp, "dp": dp, "tp": tp, "cp": 1, "sp": 1}
    return {"layout": sizes, "zero_stage": stage if isinstance(stage, int) else 0, "precision": precision}


# -- other files -----------------------------------------------------------------------------------------------------


def _schedule(checkpoint: ConvertibleCheckpoint, state: ConvertedState, notes: list[str]) -> dict[str, Any]:
    """Returns the state of the schedule; without one, the counters that a schedule of the step needs."""
    # For a torch schedule, which may be a LambdaLR, and for a DeepSpeed schedule.
    counters = {"last_epoch": state.step, "_step_count": state.step + 1, "lr_lambdas": []}
    counters["last_batch_iteration"] = state.step - 1
    path = checkpoint.path / "scheduler.pt"
    if checkpoint.is_hf_trainer and path.is_file():
        notes.append("learning rate schedule (scheduler.pt)")
        return {"last_batch_iteration": state.step - 1, **load_deepspeed_pickle(path, trusted=False)}
    if state.model.get("lr_scheduler"):
        notes.append("learning rate schedule (lr_scheduler in DeepSpeed's file)")
        return {**counters, **state.model["lr_scheduler"]}
    notes.append(
        "NOT converted: learning rate schedule (the checkpoint has none). The next step uses the stored learning rate, "
        f"then this run's schedule continues from step {state.step}"
    )
    return counters


def _random_states(checkpoint: ConvertibleCheckpoint, trusted: bool, notes: list[str]) -> Iterator[CheckpointFile]:
    """Yields the random state of each rank in the format of :func:`ds_trainer.utils.seeds.random_state`."""
    paths = sorted(checkpoint.path.glob("rng_state*.pth")) if checkpoint.is_hf_trainer else []
    for path in paths:
        rank = int(path.stem.rpartition("_")[2]) if path.stem != "rng_state" else 0
        state = load_deepspeed_pickle(path, trusted)
        name, keys, position, has_gauss, cached = state["numpy"]
        cuda = state.get("cuda")
        random_state = {
            "python": state["python"],
            "numpy": (str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)),
            "torch": state["cpu"],
            "cuda": cuda[min(rank, len(cuda) - 1)] if isinstance(cuda, list) and cuda else cuda,
        }
        yield InMemoryFile.of(f"random_state_rank{rank}.pt", random_state)
    if paths:
        notes.append(f"random states of {counted(len(paths), 'rank')}")
    else:
        notes.append("NOT converted: random states (the checkpoint has none). They are set from the seed")


def _trainer_state(checkpoint: ConvertibleCheckpoint, state: ConvertedState, notes: list[str]) -> bytes:
    values: dict[str, Any] = {"global_step": state.step, "epoch": 0}
    path = checkpoint.path / "trainer_state.json"
    if checkpoint.is_hf_trainer:
        values = parse_json(path.read_text(encoding="utf-8"))
        notes.append("trainer state with logs, best metric and callback states (trainer_state.json)")
        if values.get("best_model_checkpoint"):
            notes.append("NOT converted: the best model, which is a transformers checkpoint. Its metric is kept")
            values["best_model_checkpoint"] = None
        if values["global_step"] != state.step:
            notes.append(
                f"the step of trainer_state.json, {values['global_step']}; DeepSpeed counted {state.step}, including "
                "skipped steps"
            )
        notes.append("NOT converted: training_args.bin. This run's arguments apply")
    else:
        notes.append(
            f"NOT converted: data position (the checkpoint has none). It is computed for step {state.step} with this "
            "run's batch size"
        )
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
