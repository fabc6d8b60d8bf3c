"""The checkpoints of one run: what they hold, and how a run resumes from one.

:mod:`ds_trainer.checkpoint.protocol.checkpoint_save` describes how a checkpoint is written,
:mod:`ds_trainer.checkpoint.protocol.checkpoint_directory` what the output directory may contain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile, FallbackFile, InMemoryFile, load_pickle
from ds_trainer.checkpoint.protocol.checkpoint_save import CheckpointSave
from ds_trainer.checkpoint.protocol.manifest import DEEPSPEED, SHARDS, Manifest
from ds_trainer.checkpoint.protocol.retention import Retention
from ds_trainer.checkpoint.protocol.shared_files import SharedFile
from ds_trainer.checkpoint.protocol.writer_group import Communicator, WriterGroup
from ds_trainer.checkpoint.shards.engine_files import engine_state_files, restore_engine_state
from ds_trainer.checkpoint.shards.frozen_weights import FrozenFiles
from ds_trainer.checkpoint.shards.model_plan import ModelPlan
from ds_trainer.checkpoint.weights.adapter_files import adapter_files, adapter_tensors, saves_adapters
from ds_trainer.checkpoint.weights.base_digest import BaseDigest
from ds_trainer.checkpoint.weights.checkpoint_size import CheckpointSize, checkpoint_size
from ds_trainer.checkpoint.weights.model_saving import save_weights
from ds_trainer.engine.state.flat_partitions import UnknownState
from ds_trainer.engine.state.state_shards import frozen_shards
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.engine.weights import full_numel
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.seeds import random_state, restore_random_state

logger = get_logger(__name__)

SCHEDULE_FILE = "scheduler.pt"
_ENGINE_FOLDER = "engine"  # for state that DeepSpeed writes itself


class CheckpointManager:
    """Writes and reads the checkpoints of one run.

    Args:
        directory: that of the ``checkpoint-N`` directories.
        engine: whose state is saved.
        writer_group: the ranks that share it.
        retention: which checkpoints are kept.
        arguments: identifies the training arguments (:func:`ds_trainer.checkpoint.protocol.manifest.arguments_digest`).
        model: the model's files in each checkpoint; None for checkpoints without a model.
        frozen: knows the frozen weights, and where they are stored already; default: none.
        base: for an adapter model, identifies the base model, which checkpoints then do not hold.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        engine: TrainingEngine,
        writer_group: WriterGroup,
        retention: Retention | None = None,
        arguments: str = "",
        model: ModelPlan | None = None,
        frozen: FrozenFiles | None = None,
        base: BaseDigest | None = None,
    ) -> None:
        self.directory = directory
        self.engine = engine
        self.writer_group = writer_group
        self.retention = retention or Retention()
        self.arguments = arguments
        self.model = model
        self.frozen = frozen or FrozenFiles()
        self.base = base

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        common: Sequence[CheckpointFile],
        of_rank: Sequence[CheckpointFile] = (),
        write_model: Callable[[Path], None] | None = None,
        only_model: bool = False,
    ) -> Path:
        """Write ``checkpoint-<step>``. Collective. Returns its path.

        Args:
            step: optimizer steps done.
            common: files that are the same on all ranks: the trainer's state, the schedule.
            of_rank: files of this rank.
            write_model: writes files for ``from_pretrained`` to a directory, collectively, in place of this manager.
            only_model: whether the checkpoint holds only those and ``common``; it cannot be resumed from then.

        Raises:
            SaveFailed: the checkpoint could not be written; on all ranks.
        """
        common_files = list(common) if self.writer_group.is_leader else []
        if only_model:
            path = self._write(step, common_files, {"only_model": True}, write_model)
        else:
            engine = self.engine_state_files()
            small_files = [
                *common_files,
                *of_rank,
                *self._adapter_files(),
                InMemoryFile.of(_random_file(distributed.rank()), random_state()),
            ]
            if engine is not None:
                path = self._write(step, chain(small_files, engine), {}, write_model, self._shared_files())
            else:

                def write(partial: Path) -> None:
                    self.engine.save_state(partial, _ENGINE_FOLDER)
                    if self.model is not None:
                        save_weights(self.engine.deepspeed.module, partial, self.model.max_bytes)
                    if write_model is not None:
                        write_model(partial)

                path = self._write(step, small_files, {"engine": DEEPSPEED}, write)
        self.apply_retention()
        return path

    def files(
        self, common: Sequence[CheckpointFile], of_rank: Sequence[CheckpointFile] = ()
    ) -> Iterator[CheckpointFile]:
        """Yields all files of this rank, as :meth:`save` writes them, with the present random state and counters.

        Raises:
            UnknownState: only DeepSpeed knows how to write its state.
        """
        yield from common if self.writer_group.is_leader else ()
        yield from of_rank
        yield from self._adapter_files()
        yield InMemoryFile.of(_random_file(distributed.rank()), random_state())
        yield from self._engine_state_files()

    def _adapter_files(self) -> list[CheckpointFile]:
        """Files of an adapter model besides its shards: the adapters, and the digest of the base. Collective."""
        adapters = adapter_files(self.engine.deepspeed.module, self.writer_group.is_leader)
        files: list[CheckpointFile] = [FallbackFile(file) for file in adapters]
        base = self._excluded_base
        return [*files, base.to_file()] if base is not None and self.writer_group.is_leader else files

    def _engine_state_files(self) -> Iterator[CheckpointFile]:
        return engine_state_files(
            self.engine, self.writer_group.is_leader, self.model, self.frozen, self._excluded_names()
        )

    @cached_property
    def _excluded_base(self) -> BaseDigest | None:
        """Identifies the frozen base tensors of an adapter model, which the checkpoints do not hold."""
        return None if self.base is None else self.base.restricted_to_frozen(self.engine.deepspeed.module)

    def _excluded_names(self) -> Collection[str]:
        return () if self._excluded_base is None else self._excluded_base.tensors

    def writer(self, step: int) -> Callable[[Iterable[CheckpointFile], Communicator], Path]:
        """Returns a function that writes the :meth:`files` of ``step``, in any thread.

        The function takes the files and a communicator for the writing threads of all ranks, and returns the
        checkpoint's path. It raises SaveFailed on all ranks.
        """
        metadata, shared = self.metadata(), self._shared_files()

        def write(files: Iterable[CheckpointFile], communicator: Communicator) -> Path:
            save = CheckpointSave(self.directory, self.writer_group, step, metadata, communicator, shared)
            path = self._run(save, files)
            self.apply_retention()
            return path

        return write

    def size(self) -> CheckpointSize:
        """Returns the size of a checkpoint as it would be written now. Collective; all state must be in memory.

        Raises:
            UnknownState: only DeepSpeed knows how to write its state.
        """
        module: Any = self.engine.deepspeed.module
        adapters = adapter_tensors(module).values() if saves_adapters(module) and self.writer_group.is_leader else ()
        adapter_bytes = sum(full_numel(tensor) * tensor.element_size() for tensor in adapters)
        frozen = FrozenFiles(self.frozen.names)
        files = engine_state_files(self.engine, False, self.model, frozen, self._excluded_names())
        return checkpoint_size(files, self.model, adapter_bytes)

    def engine_state_files(self) -> Iterator[CheckpointFile] | None:
        """Returns this rank's part of the engine's state; None if only DeepSpeed knows how to write it."""
        files = self._engine_state_files()
        try:
            first = next(files)
        except UnknownState as error:
            logger.warning("This checkpoint can be resumed only in the same layout: %s.", error)
            return None
        return chain([first], files)

    def metadata(self) -> dict[str, Any]:
        """Returns the manifest's fields about the run."""
        return {
            "layout": _sizes(self.engine),
            "zero_stage": self.engine.stage,
            "precision": self.engine.precision,
            "arguments": self.arguments,
        }

    def apply_retention(self) -> None:
        """Remove the checkpoints that exceed the limits."""
        if self.writer_group.is_leader:
            self.retention.apply(self.directory)

    def _write(
        self,
        step: int,
        files: Iterable[CheckpointFile],
        metadata: dict[str, Any],
        write_external: Callable[[Path], None] | None = None,
        shared: Sequence[SharedFile] = (),
    ) -> Path:
        metadata = {**self.metadata(), **metadata}
        save = CheckpointSave(self.directory, self.writer_group, step, metadata, distributed, shared)
        return self._run(save, files, write_external)

    def _run(
        self,
        save: CheckpointSave,
        files: Iterable[CheckpointFile],
        write_external: Callable[[Path], None] | None = None,
    ) -> Path:
        path = save.run(files, write_external)
        self.frozen.record_save(path, save.written)
        return path

    def _shared_files(self) -> Sequence[SharedFile]:
        """The model's files; frozen ones with the stored copy to link to. Call this after :meth:`files`."""
        if self.model is None:
            return ()
        frozen = self.model.frozen
        return [
            file._replace(stored=self.frozen.stored(file.name, file.header)) if file.name in frozen else file
            for file in self.model.files
        ]

    # -- resuming -----------------------------------------------------------------------------------------------------

    def load(self, path: Path, keep: Collection[str] = (), states: bool = True) -> dict[str, Any]:
        """Restore weights, optimizer and random state from ``path``; return the state of the schedule. Collective.

        ``path`` must be a verified checkpoint. Its pickles are trusted, because an intact manifest of this package
        lists them.

        Args:
            path: the checkpoint's directory.
            keep: optimizer settings that keep their present values; ``"schedule"`` for DeepSpeed's schedule.
            states: False skips optimizer states, for another optimizer.

        Raises:
            ConfigError: it holds weights only, or state that can be read in its own layout only.
        """
        manifest = self._load_engine(path, keep, states)
        schedule = load_pickle(path / SCHEDULE_FILE, trusted=True)
        written = ParallelLayout(*(manifest.layout[name] for name in ("world_size", "tp", "cp", "sp")))
        name = _random_file(rank_with_random_state(written, self.engine.layout, distributed.rank()))
        if name in manifest.files:  # with save_on_each_node, each machine has those of its own ranks only
            restore_random_state(load_pickle(path / name, trusted=True))
        return dict(schedule)

    def is_same_layout(self, manifest: Manifest) -> bool:
        """Returns whether a checkpoint was written in the engine's layout, world size, ZeRO stage and precision."""
        return manifest.same_layout(_sizes(self.engine), self.engine.stage, self.engine.precision)

    def load_best(self, path: Path) -> None:
        """Restore the weights of ``path``, and the optimizer state if it has one, after training. Collective.

        Raises:
            BrokenCheckpoint: it is damaged.
            ConfigError: as :meth:`load`.
        """
        from ds_trainer.checkpoint.loading.engine_weights import load_engine_weights
        from ds_trainer.checkpoint.selection import verify_checkpoint

        _, manifest = verify_checkpoint(path, self.writer_group, distributed)
        logger.info("Loading the best model from %s.", path)
        if manifest.only_model:
            load_engine_weights(self.engine, path)
        else:
            self._load_engine(path)

    def _load_engine(self, path: Path, keep: Collection[str] = (), states: bool = True) -> Manifest:
        manifest = Manifest.read(path)
        manifest.check_resumable(path)
        same = self.is_same_layout(manifest)
        if manifest.engine == SHARDS:
            excluded = self._check_base(path)
            restore_engine_state(
                engine=self.engine,
                directory=path,
                same_layout=same,
                keep=keep,
                names=manifest.files,
                trusted=True,
                states=states,
                writer_group=self.writer_group,
                excluded=excluded,
            )
            shards = frozen_shards(self.engine, self.frozen.names.difference(excluded))
            self.frozen.record_load(path, manifest.files.values(), shards)
        elif same:
            self.engine.load_state(path, _ENGINE_FOLDER)
        else:
            raise ConfigError(
                f"{path} holds optimizer state in DeepSpeed's own form and can be resumed only in its own layout: "
                f"{dict(manifest.layout)}, ZeRO stage {manifest.zero_stage}, {manifest.precision}. This run has "
                f"{_sizes(self.engine)}, ZeRO stage {self.engine.stage}, {self.engine.precision}."
            )
        return manifest

    def _check_base(self, path: Path) -> Collection[str]:
        """Compare the base model of adapters with that of the checkpoint at ``path``. Collective.

        Returns:
            Names of the base tensors, which the checkpoint does not hold.
        """
        expected = BaseDigest.read(path)
        if expected is None:
            return ()
        expected.check(self.base or BaseDigest.of(self.engine), path)
        return expected.tensors

    def finish(self) -> None:
        """End of training: with ``keep=1``, keep only the best checkpoint, without the newest. Collective."""
        best = self.retention.best
        if self.retention.keep == 1 and best is not None and best.is_dir() and self.writer_group.is_leader:
            others = [e.path for e in self.directory.entries() if e.is_ours and e.path.resolve() != best.resolve()]
            if others:
                self.directory.point_at(best)
            for path in others:
                logger.info("Removing %s: save_total_limit=1, and %s is the best.", path, best.name)
                self.directory.remove(path)
        distributed.barrier()


def _sizes(engine: TrainingEngine) -> dict[str, int]:
    layout = engine.layout
    return {"world_size": layout.world_size, "dp": layout.dp, "tp": layout.tp, "cp": layout.cp, "sp": layout.sp}


def _random_file(rank: int) -> str:
    return f"random_state_rank{rank}.pt"


def rank_with_random_state(written: ParallelLayout, present: ParallelLayout, rank: int) -> int:
    """Returns the rank whose random state ``rank`` restores from a checkpoint of the layout ``written``.

    In the same layout, that is ``rank`` itself. In another layout, it is the first rank of the replica with the same
    index, because the ranks of a replica must have equal random states. Replicas that did not exist use the first
    replica's.
    """
    if written == present:
        return rank
    replica = present.coordinates(rank).dp
    return written.rank_at(dp=replica if replica < written.dp else 0)
