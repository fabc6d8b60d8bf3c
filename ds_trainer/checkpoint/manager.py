"""The checkpoints of one run: what goes into them, and how a run goes on from one.

How they are written is in :mod:`ds_trainer.checkpoint.protocol.saving`, what may be found in the output directory in
:mod:`ds_trainer.checkpoint.protocol.directory`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ds_trainer.checkpoint.pieces.engine_files import engine_contents, read_engine_files
from ds_trainer.checkpoint.pieces.frozen import FrozenFiles
from ds_trainer.checkpoint.pieces.model_plan import ModelPlan
from ds_trainer.checkpoint.pieces.random_states import rank_with_random_state
from ds_trainer.checkpoint.protocol.choosing import Checkpoint, newest_valid, verified
from ds_trainer.checkpoint.protocol.contents import Content, Held
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory, list_checkpoints
from ds_trainer.checkpoint.protocol.manifest import DEEPSPEED, PIECES, Manifest
from ds_trainer.checkpoint.protocol.pickles import load_pickle
from ds_trainer.checkpoint.protocol.retention import Retention
from ds_trainer.checkpoint.protocol.saving import CheckpointSave
from ds_trainer.checkpoint.protocol.shared_files import SharedFile
from ds_trainer.checkpoint.protocol.sharing import Messages, Sharing
from ds_trainer.checkpoint.weights.adapters import adapter_contents, adapter_tensors, saves_adapters
from ds_trainer.checkpoint.weights.base import BaseDigest
from ds_trainer.checkpoint.weights.save_size import SaveSize, size_of_save
from ds_trainer.checkpoint.weights.writing import save_weights
from ds_trainer.engine.state.pieces import frozen_pieces
from ds_trainer.engine.state.units import UnknownState
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.engine.weights import full_numel
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.seeds import random_state, restore_random_state

logger = get_logger(__name__)

STATE_FILE = "trainer_state.json"
SCHEDULE_FILE = "scheduler.pt"
_ENGINE_FOLDER = "engine"  # of what DeepSpeed writes itself


class CheckpointManager:
    """Writes and reads the checkpoints of one run.

    Args:
        output_dir: where ``checkpoint-N`` directories live.
        engine: whose state is kept.
        sharing: which ranks share ``output_dir``.
        retention: which checkpoints stay.
        frozen: knows which weights stay as they are, and where they are stored already; default: none.
        base: of an adapter model: what identifies its base, which checkpoints then do not hold.
        arguments: identifies the training arguments (:func:`ds_trainer.checkpoint.protocol.manifest.arguments_digest`).
        model: the files by which a checkpoint is a model too; None for checkpoints without.
    """

    def __init__(
        self,
        output_dir: Path,
        engine: TrainingEngine,
        sharing: Sharing,
        retention: Retention | None = None,
        arguments: str = "",
        model: ModelPlan | None = None,
        frozen: FrozenFiles | None = None,
        base: BaseDigest | None = None,
    ) -> None:
        self.directory = CheckpointDirectory(output_dir)
        self.engine = engine
        self.sharing = sharing
        self.retention = retention or Retention()
        self.arguments = arguments
        self.model = model
        self.frozen = frozen or FrozenFiles()
        self.base = base

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        shared: Sequence[Content],
        own: Sequence[Content] = (),
        write_weights: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write ``checkpoint-<step>``. Collective. Returns its path.

        Args:
            step: optimizer steps done.
            shared: files that are alike on all ranks: the trainer's state, the schedule.
            own: files of this rank.
            write_weights: writes the weights to a directory, collectively; the checkpoint then holds them and
                ``shared`` only, and cannot be resumed from.

        Raises:
            SaveFailed: it could not be written; on all ranks.
        """
        once = list(shared) if self.sharing.commits else []
        if write_weights is not None:
            path = self._write(step, once, {"only_model": True}, write_weights)
        else:
            engine = self.engine_contents()
            mine = [*once, *own, *self._adapter_contents(), Held.of(_random_file(distributed.rank()), random_state())]
            if engine is not None:
                path = self._write(step, chain(mine, engine), {}, shared=self._shared_files())
            else:
                path = self._write(step, mine, {"engine": DEEPSPEED}, self._write_by_deepspeed)
        self.retire()
        return path

    def contents(self, shared: Sequence[Content], own: Sequence[Content] = ()) -> Iterator[Content]:
        """All files of this rank, as :meth:`save` writes them. Random state and counters are those of now.

        Raises:
            UnknownState: only DeepSpeed knows how to write its state.
        """
        yield from shared if self.sharing.commits else ()
        yield from own
        yield from self._adapter_contents()
        yield Held.of(_random_file(distributed.rank()), random_state())
        yield from self._engine_contents()

    def _adapter_contents(self) -> list[Content]:
        """Files of an adapter model besides its pieces. Collective."""
        files = adapter_contents(self.engine.deepspeed.module, self.sharing.commits)
        return [*files, self._left_out.content()] if self._left_out is not None and self.sharing.commits else files

    def _engine_contents(self) -> Iterator[Content]:
        left_out = () if self._left_out is None else self._left_out.tensors
        return engine_contents(self.engine, self.sharing.commits, self.model, self.frozen, left_out)

    @cached_property
    def _left_out(self) -> BaseDigest | None:
        return None if self.base is None else self.base.while_frozen(self.engine.deepspeed.module)

    def writer(self, step: int) -> Callable[[Iterable[Content], Messages], Path]:
        """What writes the :meth:`contents` of ``step``, in any thread; ranks hear from each other by ``Messages``.

        It raises SaveFailed, on all ranks.
        """
        facts, shared = self.facts(), self._shared_files()

        def write(files: Iterable[Content], messages: Messages) -> Path:
            save = CheckpointSave(self.directory, self.sharing, step, facts, messages, shared)
            path = self._run(save, files)
            self.retire()
            return path

        return write

    def size(self) -> SaveSize:
        """Of a checkpoint as it would be written now. Collective; all of the state must be in memory.

        Raises:
            UnknownState: only DeepSpeed knows how to write its state.
        """
        module: Any = self.engine.deepspeed.module
        adapters = adapter_tensors(module).values() if saves_adapters(module) and self.sharing.commits else ()
        beside = sum(full_numel(tensor) * tensor.element_size() for tensor in adapters)
        frozen = FrozenFiles(self.frozen.names)
        left_out = () if self._left_out is None else self._left_out.tensors
        contents = engine_contents(self.engine, False, self.model, frozen, left_out)
        return size_of_save(contents, self.model, beside)

    def engine_contents(self) -> Iterator[Content] | None:
        """This rank's part of the engine's state; None where only DeepSpeed knows how to write it."""
        contents = self._engine_contents()
        try:
            first = next(contents)
        except UnknownState as error:
            if self.sharing.rank == 0:
                logger.warning("This checkpoint can be resumed from in the same layout only: %s.", error)
            return None
        return chain([first], contents)

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the run."""
        return {
            "layout": _sizes(self.engine),
            "zero_stage": self.engine.stage,
            "precision": self.engine.precision,
            "arguments": self.arguments,
        }

    def retire(self) -> None:
        """Remove the checkpoints that are too many."""
        if self.sharing.commits:
            self.retention.apply(self.directory)

    def _write(
        self,
        step: int,
        contents: Any,
        facts: dict[str, Any],
        by_others: Callable[[Path], None] | None = None,
        shared: Sequence[SharedFile] = (),
    ) -> Path:
        known = {**self.facts(), **facts}
        save = CheckpointSave(self.directory, self.sharing, step, known, distributed, shared)
        return self._run(save, contents, by_others)

    def _run(
        self, save: CheckpointSave, contents: Iterable[Content], by_others: Callable[[Path], None] | None = None
    ) -> Path:
        path = save.run(contents, by_others)
        self.frozen.committed(path, save.written)
        return path

    def _shared_files(self) -> Sequence[SharedFile]:
        """The model's files, those of frozen weights with where they lie already; after :meth:`contents`."""
        if self.model is None:
            return ()
        apart = self.model.frozen
        return [
            f._replace(stored=self.frozen.stored(f.name, f.head)) if f.name in apart else f for f in self.model.files
        ]

    def _write_by_deepspeed(self, partial: Path) -> None:
        self.engine.save_state(partial, _ENGINE_FOLDER)
        if self.model is not None:
            save_weights(self.engine.deepspeed.module, partial, self.model.max_bytes)

    # -- resuming -----------------------------------------------------------------------------------------------------

    def load(self, path: Path, keep: Collection[str] = (), states: bool = True) -> dict[str, Any]:
        """Put back weights, optimizer and random state from ``path``; returns the state of the schedule. Collective.

        ``path`` is a checkpoint that was verified, so that its pickles are trusted: its manifest is ours and intact.

        Args:
            path: of the checkpoint.
            keep: settings of the optimizer that stay as they are now, ``"schedule"`` for that of DeepSpeed.
            states: False leaves out the states of the optimizer: for another optimizer.

        Raises:
            ConfigError: it holds weights only, or something that can be read in its own layout only.
        """
        manifest = self._load_engine(path, keep, states)
        schedule = load_pickle(path / SCHEDULE_FILE, trusted=True)
        written = ParallelLayout(*(manifest.layout[name] for name in ("world_size", "tp", "cp", "sp")))
        name = _random_file(rank_with_random_state(written, self.engine.layout, distributed.rank()))
        if name in manifest.files:  # with save_on_each_node each machine has those of its own ranks
            restore_random_state(load_pickle(path / name, trusted=True))
        return dict(schedule)

    def is_same_layout(self, manifest: Manifest) -> bool:
        """Whether as many ranks wrote a checkpoint in the same layout, ZeRO stage and precision."""
        return manifest.same_layout(_sizes(self.engine), self.engine.stage, self.engine.precision)

    def load_best(self, path: Path) -> None:
        """Put back the weights of ``path``, with their optimizer state, when training has ended. Collective.

        Raises:
            BrokenCheckpoint: it is damaged.
            ConfigError: as :meth:`load`.
        """
        verified(path, self.sharing, distributed)
        logger.info("Loading the best model from %s.", path)
        self._load_engine(path)

    def _load_engine(self, path: Path, keep: Collection[str] = (), states: bool = True) -> Manifest:
        manifest = Manifest.read(path)
        _check_resumable(path, manifest)
        same = self.is_same_layout(manifest)
        if manifest.engine == PIECES:
            left_out = self._checked_base(path)
            read_engine_files(self.engine, path, same, keep, manifest.files, True, states, self.sharing, left_out)
            pieces = frozen_pieces(self.engine, self.frozen.names.difference(left_out))
            self.frozen.loaded(path, manifest.files.values(), pieces)
        elif same:
            self.engine.load_state(path, _ENGINE_FOLDER)
        else:
            raise ConfigError(
                f"{path} was written by DeepSpeed's own optimizer in the layout {dict(manifest.layout)}, ZeRO stage "
                f"{manifest.zero_stage}, {manifest.precision}, and can be resumed from in no other; here it is "
                f"{_sizes(self.engine)}, ZeRO stage {self.engine.stage}, {self.engine.precision}."
            )
        return manifest

    def _checked_base(self, path: Path) -> Collection[str]:
        """Names of parameters that the checkpoint at ``path`` does not hold, after they were compared. Collective."""
        wanted = BaseDigest.read(path)
        if wanted is None:
            return ()
        wanted.check(self.base or BaseDigest.of(self.engine), path)
        return wanted.tensors

    def finish(self) -> None:
        """Training has ended: with ``keep=1`` only the best checkpoint stays, not the newest beside it. Collective."""
        best = self.retention.best
        if self.retention.keep == 1 and best is not None and best.is_dir() and self.sharing.commits:
            others = [p for p in list_checkpoints(self.directory.path) if p.resolve() != best.resolve()]
            if others:
                self.directory.point_at(best)
            for path in others:
                logger.info("Removing %s: save_total_limit=1, and %s is the best.", path, best.name)
                self.directory.remove(path)
        distributed.barrier()


def choose_checkpoint(asked: Path | None, output_dir: Path, sharing: Sharing) -> Checkpoint:
    """The checkpoint to resume from, after all ranks have read it: ``asked``, or the newest whole one. Collective.

    Raises:
        BrokenCheckpoint: it is damaged, or none is whole.
        ConfigError: it holds weights only.
    """
    if asked is not None:
        found = verified(asked, sharing, distributed)
    else:
        found = newest_valid(CheckpointDirectory(output_dir), sharing, distributed)
    _check_resumable(*found)
    return found


def _check_resumable(path: Path, manifest: Manifest) -> None:
    if manifest.only_model:
        raise ConfigError(
            f"{path} holds weights only (save_only_model=True when it was written): there is nothing to resume from. "
            f"Begin a new run from them with start_from_weights={str(path)!r}."
        )


def _sizes(engine: TrainingEngine) -> dict[str, int]:
    layout = engine.layout
    return {
        "world_size": layout.world_size,
        "dp": layout.dp,
        "tp": layout.tp,
        "cp": layout.cp,
        "sp": layout.sp,
    }


def _random_file(rank: int) -> str:
    return f"random_state_rank{rank}.pt"
