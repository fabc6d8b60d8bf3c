"""Checkpoints: written beside their final name, renamed when whole, found again, and removed when too many.

``checkpoint-N`` holds the state after optimizer step N: DeepSpeed's shards, the schedule, the random state of every
rank, the trainer's state and the layout it was written with. Whatever is called ``checkpoint-N`` is complete: it
appears by a rename after all ranks have written.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json, write_json
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.seeds import random_state, restore_random_state

logger = get_logger(__name__)

STATE_FILE = "trainer_state.json"
_FACTS_FILE = "checkpoint.json"
_SCHEDULE_FILE = "scheduler.pt"
_ENGINE_TAG = "engine"
_ONLY_MODEL = "only_model"
_NAME = re.compile(r"checkpoint-(\d+)")
_PARTIAL = ".partial"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Complete checkpoints in ``output_dir``, oldest step first."""
    if not output_dir.is_dir():
        return []
    found = [(int(match[1]), path) for path in output_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / _FACTS_FILE).is_file()]


def find_checkpoint(asked: str | bool, output_dir: Path) -> Path:
    """The checkpoint to resume from: the newest of ``output_dir`` for True, else the one at this path.

    Raises:
        ConfigError: there is none.
    """
    if str(asked).lower() == "true":  # a recipe and a command line have words only
        found = list_checkpoints(output_dir)
        if not found:
            raise ConfigError(
                f"resume_from_checkpoint=True, but {output_dir} holds no complete checkpoint-N directory. Start "
                "without it, or give the path of a checkpoint."
            )
        return found[-1]
    path = Path(str(asked)).expanduser()
    if not (path / _FACTS_FILE).is_file():
        raise ConfigError(
            f"resume_from_checkpoint={str(path)!r} is no complete checkpoint ({_FACTS_FILE} is missing in it). "
            f"Complete ones in {output_dir}: {', '.join(p.name for p in list_checkpoints(output_dir)) or 'none'}."
        )
    return path


class CheckpointManager:
    """Writes, reads and removes the checkpoints of one run.

    Args:
        output_dir: where ``checkpoint-N`` directories live.
        engine: whose state is kept.
        keep: how many checkpoints stay; None keeps all.
        best: the checkpoint of the best evaluation; it stays, and so does the newest, also where ``keep`` is 1.
    """

    def __init__(self, output_dir: Path, engine: TrainingEngine, keep: int | None, best: Path | None = None) -> None:
        self.output_dir = output_dir
        self.engine = engine
        self.keep = keep
        self.best = best

    def save(
        self,
        step: int,
        write_state: Callable[[Path], None],
        schedule: dict[str, Any],
        write_weights: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write ``checkpoint-<step>``. Collective. Returns its path.

        Args:
            step: optimizer steps done.
            write_state: writes the trainer's state to a file.
            schedule: state of the learning-rate schedule.
            write_weights: writes the weights to a directory, collectively; the checkpoint then holds them and the
                trainer's state only, and cannot be resumed from.
        """
        final = self.output_dir / f"checkpoint-{step}"
        partial = final.with_name(final.name + _PARTIAL)
        main = distributed.rank() == 0
        if main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        distributed.barrier()
        if write_weights is not None:
            write_weights(partial)
        else:
            self.engine.save_state(partial, _ENGINE_TAG)
            torch.save(random_state(), partial / self._random_file())
            if main:
                torch.save(schedule, partial / _SCHEDULE_FILE)
        if main:
            write_state(partial / STATE_FILE)
            write_json(partial / _FACTS_FILE, {"step": step, _ONLY_MODEL: write_weights is not None, **self._facts()})
        distributed.barrier()  # every rank has written before the name appears
        if main:
            shutil.rmtree(final, ignore_errors=True)  # a run that is repeated in place writes the same step again
            os.replace(partial, final)
            self._remove_oldest()
        distributed.barrier()
        return final

    def load(self, path: Path) -> dict[str, Any]:
        """Put back weights, optimizer and random state from ``path``; returns the state of the schedule. Collective.

        Raises:
            ConfigError: the checkpoint was written with another layout or ZeRO stage, or holds weights only.
        """
        self._check_facts(path)
        self.engine.load_state(path, _ENGINE_TAG)
        schedule = torch.load(path / _SCHEDULE_FILE, weights_only=True)
        restore_random_state(torch.load(path / self._random_file(), weights_only=True))
        return dict(schedule)

    def _check_facts(self, path: Path) -> None:
        written, present = read_json(path / _FACTS_FILE), self._facts()
        if written.get(_ONLY_MODEL):
            raise ConfigError(
                f"{path} holds weights only (save_only_model=True when it was written): there is nothing to resume "
                "from. Load the model from it and start anew."
            )
        differing = [
            f"{name}={written.get(name)!r} there, {value!r} here"
            for name, value in present.items()
            if written.get(name) != value
        ]
        if differing:
            raise ConfigError(
                f"{path} was written by another kind of run: {'; '.join(differing)}. Resume with the same number of "
                "ranks, ZeRO stage and precision, or start anew from its weights."
            )

    def _random_file(self) -> str:
        return f"random_state_rank{distributed.rank()}.pt"

    def _facts(self) -> dict[str, Any]:
        layout = self.engine.layout
        return {
            "world_size": layout.world_size,
            "dp": layout.dp,
            "tp": layout.tp,
            "cp": layout.cp,
            "sp": layout.sp,
            "zero_stage": self.engine.stage,
            "precision": self.engine.precision,
        }

    def load_best(self, path: Path) -> None:
        """Put back the weights of ``path``, with their optimizer state, when training has ended. Collective.

        Raises:
            ConfigError: as :meth:`load`.
        """
        self._check_facts(path)
        logger.info("Loading the best model from %s.", path)
        self.engine.load_state(path, _ENGINE_TAG)

    def finish(self) -> None:
        """Training has ended: with ``keep=1`` only the best checkpoint stays, not the newest beside it. Collective."""
        if self.keep == 1 and self.best is not None and self.best.is_dir() and distributed.rank() == 0:
            for path in list_checkpoints(self.output_dir):
                if path.resolve() != self.best.resolve():
                    logger.info("Removing %s: save_total_limit=1, and %s is the best.", path, self.best.name)
                    shutil.rmtree(path)
        distributed.barrier()

    def _remove_oldest(self) -> None:
        if self.keep is None:
            return
        found = list_checkpoints(self.output_dir)
        staying = {found[-1].resolve(), *([self.best.resolve()] if self.best is not None else [])}
        too_many = len(found) - max(self.keep, len(staying))
        for path in [path for path in found if path.resolve() not in staying][: max(0, too_many)]:
            logger.info("Removing %s: save_total_limit=%d.", path, self.keep)
            shutil.rmtree(path)
