"""Checkpoints of DeepSpeed and of transformers.Trainer, turned into ours.

Read are: ``engine.save_checkpoint`` of every ZeRO stage (tensor-parallel ones too), DeepSpeed's universal form, and
``checkpoint-N`` directories of transformers. Shards become whole tensors by DeepSpeed's own converter, in a directory
beside, on the CPU, one shard and one tensor at a time.
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

from ds_trainer.checkpoint.foreign.engine_shards import ForeignState, UniversalFiles
from ds_trainer.checkpoint.foreign.plain_trainer import PlainTrainerFiles, RunningModel
from ds_trainer.checkpoint.foreign.unsharded import UnshardedFile
from ds_trainer.checkpoint.pieces.content import PiecesContent
from ds_trainer.checkpoint.pieces.engine_files import PROGRESS_FILE
from ds_trainer.checkpoint.protocol.contents import Content, Held
from ds_trainer.checkpoint.protocol.files import CheckpointFiles
from ds_trainer.checkpoint.protocol.foreign_formats import Foreign, Kind, check_pickles, read_foreign, recognise
from ds_trainer.engine.state.pieces import Piece
from ds_trainer.utils.errors import ConfigError

_FILE_BYTES = 2**30  # of pieces in one file
_ADAM = {"exp_avg", "exp_avg_sq", "step"}


class Converted(NamedTuple):
    """What was made of a checkpoint.

    Attributes:
        step: optimizer steps done.
        facts: of the run that wrote it: sizes of the axes, ZeRO stage, precision.
        notes: sentences for the user: what was taken over, and what was not.
    """

    step: int
    facts: dict[str, Any]
    notes: list[str]


def foreign_at(path: Path) -> Foreign:
    """The checkpoint of DeepSpeed or transformers at ``path``.

    Raises:
        ConfigError: there is none.
    """
    found = recognise(path)
    if found is None:
        raise ConfigError(
            f"{path} is no checkpoint of DeepSpeed: there are no *_model_states.pt, neither in it nor in the directory "
            "that a file 'latest' or 'latest_universal' in it names. Neither is it one of transformers.Trainer: there "
            "is no trainer_state.json with optimizer.pt or training_args.bin."
        )
    return found


def write_as_ours(
    foreign: Foreign, files: CheckpointFiles, trusted: bool, here: RunningModel | None = None
) -> Converted:
    """Write all files of a checkpoint of ours but its manifest into ``files.directory``.

    Args:
        foreign: what is read.
        files: where to; DeepSpeed's converter writes to a directory in it, which is removed in the end.
        trusted: unpickle whatever is in the files.
        here: the model that goes on, which a checkpoint of transformers.Trainer without DeepSpeed needs.

    Raises:
        ConfigError: it cannot be converted, and why.
    """
    check_pickles(foreign.files, trusted)
    scratch = files.directory / "universal"
    source = _source_of(foreign, scratch, trusted, here)
    state = source.state
    for content in _contents(source.pieces(), state):
        with files.create(content.name) as stream:
            content.write(stream)
    shutil.rmtree(scratch, ignore_errors=True)
    notes: list[str] = []
    schedule = _schedule(foreign, state, notes)
    if isinstance(source, PlainTrainerFiles):
        notes += source.notes
        schedule = source.schedule(schedule)
        _write(files, [source.base.content()] if source.base is not None else [])
    _write(files, [Held.of(PROGRESS_FILE, state.progress()), Held.of("scheduler.pt", schedule)])
    _write(files, _random_states(foreign, trusted, notes))
    _write(files, [Held("trainer_state.json", _trainer_state(foreign, state, notes))])
    return Converted(state.step, _facts(foreign, state), notes)


def _write(files: CheckpointFiles, contents: Iterable[Content]) -> None:
    for content in contents:
        with files.create(content.name) as stream:
            content.write(stream)


# -- the engine -------------------------------------------------------------------------------------------------------


def _source_of(
    foreign: Foreign, scratch: Path, trusted: bool, here: RunningModel | None
) -> UniversalFiles | UnshardedFile | PlainTrainerFiles:
    if foreign.kind is Kind.PLAIN_TRAINER:
        if here is None:
            raise ConfigError(
                f"{foreign.path} is of transformers.Trainer without DeepSpeed, whose optimizer numbers its parameters "
                "without naming them: only a run with the model can tell which they are. Resume from it: "
                f"train(resume_from_checkpoint={str(foreign.path)!r})."
            )
        return PlainTrainerFiles(foreign.path, here, trusted)
    if foreign.is_universal:
        return UniversalFiles(foreign.files, trusted)
    shards = sorted(foreign.files.glob("*zero_pp_rank_*_optim_states.pt"))
    if not shards:
        return UnshardedFile(foreign.files, trusted)
    _refuse_what_is_lost(foreign.files, shards[0], trusted)
    to_universal(foreign.files, scratch / "step")
    return UniversalFiles(scratch / "step", trusted)


def _refuse_what_is_lost(directory: Path, shard: Path, trusted: bool) -> None:
    """What DeepSpeed's converter leaves out or falls over."""
    if found := sorted(directory.glob("layer_*")):
        raise ConfigError(
            f"{directory} holds {found[0].name}: pipelines and experts in files of their own are not read."
        )
    if (directory / "offloaded_tensors").is_dir():
        raise ConfigError(
            f"{directory} holds offloaded_tensors: the optimizer's states were on NVMe, and DeepSpeed keeps them as "
            "they lay there. Load it with DeepSpeed in its own layout, and save it without offload to NVMe."
        )
    state = read_foreign(shard, trusted)["optimizer_state_dict"]
    state = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    states = state.get("state") if isinstance(state, dict) else None
    if not states:
        raise ConfigError(f"{shard} holds no optimizer state (no step was made, or elastic_checkpoint is on).")
    keys = {key for one in states.values() for key in one}
    if not {"exp_avg", "exp_avg_sq"} <= keys <= _ADAM:
        raise ConfigError(
            f"{shard}: the optimizer's states are {', '.join(sorted(keys)) or 'none'}; DeepSpeed's converter "
            "(ds_to_universal) reads those of Adam only: exp_avg, exp_avg_sq, step. Start anew from its weights."
        )


def to_universal(directory: Path, target: Path) -> None:
    """Turn DeepSpeed's shards into its universal form, by its own converter. In this process.

    Raises:
        ConfigError: DeepSpeed could not.
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
    said = io.StringIO()  # progress bars
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _scalars_as_vectors():
            ds_to_universal.main(options)
    except Exception as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ConfigError(
            f"{directory} could not be converted: DeepSpeed's ds_to_universal failed with {type(error).__name__}: "
            f"{str(error) or 'no message'}."
        ) from error


@contextlib.contextmanager
def _scalars_as_vectors() -> Iterator[None]:
    """DeepSpeed 0.19.8 concatenates parameters, which torch refuses without dimensions: they get one for so long."""
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


def _contents(pieces: Iterator[Piece], state: ForeignState) -> Iterator[PiecesContent]:
    """Files of about a gigabyte: tensors of that many are mapped at a time."""
    batch: list[Piece] = []
    size = count = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.tensor.numel() * piece.tensor.element_size()
        if size >= _FILE_BYTES:
            yield _file_of(count, batch, state)
            batch, size, count = [], 0, count + 1
    if batch:
        yield _file_of(count, batch, state)


def _file_of(index: int, pieces: list[Piece], state: ForeignState) -> PiecesContent:
    name = "rank_00000" + (f".{index}" if index else "") + ".safetensors"
    named = {piece.name for piece in pieces}
    return PiecesContent(name, pieces, {name: of for name, of in state.scalars.items() if name in named})


def _facts(foreign: Foreign, state: ForeignState) -> dict[str, Any]:
    config = state.model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    stage = config.get("zero_optimization", {}).get("stage", 0)
    precision = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True), "fp32")
    tp = int(state.model.get("mp_world_size") or 1)
    dp = int(state.model.get("dp_world_size") or 1)
    sizes = {"world_size": dp * tp, "dp": dp, "tp": tp, "cp": 1, "sp": 1}
    return {"layout": sizes, "zero_stage": stage if isinstance(stage, int) else 0, "precision": precision}


# -- what is beside it ------------------------------------------------------------------------------------------------


def _schedule(foreign: Foreign, state: ForeignState, notes: list[str]) -> dict[str, Any]:
    """The schedule's state; where there is none, the place that is enough for one which follows from the step."""
    # Of a schedule of torch, which may be a LambdaLR; and of one of DeepSpeed.
    place = {"last_epoch": state.step, "_step_count": state.step + 1, "lr_lambdas": []}
    place["last_batch_iteration"] = state.step - 1
    path = foreign.path / "scheduler.pt"
    if foreign.is_of_trainer and path.is_file():
        notes.append("the schedule of learning rates (scheduler.pt)")
        return {"last_batch_iteration": state.step - 1, **read_foreign(path, trusted=False)}
    if state.model.get("lr_scheduler"):
        notes.append("the schedule of learning rates (lr_scheduler of DeepSpeed's file)")
        return {**place, **state.model["lr_scheduler"]}
    notes.append(
        "NOT a schedule, it has none: the next step has its learning rate, then this run's schedule goes on from "
        f"step {state.step}"
    )
    return place


def _random_states(foreign: Foreign, trusted: bool, notes: list[str]) -> Iterator[Content]:
    """Of each rank, in the form of :func:`ds_trainer.utils.seeds.random_state`."""
    found = sorted(foreign.path.glob("rng_state*.pth")) if foreign.is_of_trainer else []
    for path in found:
        rank = int(path.stem.rpartition("_")[2]) if path.stem != "rng_state" else 0
        state = read_foreign(path, trusted)
        name, keys, position, has_gauss, cached = state["numpy"]
        cuda = state.get("cuda")
        own = {
            "python": state["python"],
            "numpy": (str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)),
            "torch": state["cpu"],
            "cuda": cuda[min(rank, len(cuda) - 1)] if isinstance(cuda, list) and cuda else cuda,
        }
        yield Held.of(f"random_state_rank{rank}.pt", own)
    if found:
        notes.append(f"the random state of {len(found)} ranks")
    else:
        notes.append("NOT random states, it has none: they are those of the seed")


def _trainer_state(foreign: Foreign, state: ForeignState, notes: list[str]) -> bytes:
    values: dict[str, Any] = {"global_step": state.step, "epoch": 0}
    path = foreign.path / "trainer_state.json"
    if foreign.is_of_trainer:
        values = json.loads(path.read_text(encoding="utf-8"))
        notes.append("the trainer's state with logs, best metric and states of callbacks (trainer_state.json)")
        if values.get("best_model_checkpoint"):
            notes.append("NOT the best model: it is a checkpoint of transformers, of which only the metric counts on")
            values["best_model_checkpoint"] = None
        if values["global_step"] != state.step:
            notes.append(
                f"steps by trainer_state.json, {values['global_step']}; DeepSpeed has counted {state.step}, with those "
                "that it skipped"
            )
        notes.append("NOT training_args.bin: the arguments are this run's")
    else:
        notes.append(
            f"NOT a place in the data, it has none: it is that of step {state.step} with this run's batch size"
        )
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
