"""``RunRecorder``: records what happens to a training, and writes its report however it ends.

The main process writes ``run_history.jsonl`` during the training, and ``report.html`` and ``report.json`` at its end
(:mod:`ds_trainer.monitor.report`). A training that ends before it has its header is recorded at that end. A failure in
here is logged; it neither ends a training nor hides the error that did.
"""

from __future__ import annotations

import logging
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.sampler import DistributedBatchSampler
from ds_trainer.monitor.header import RunSummary, header_lines
from ds_trainer.monitor.report.facts import changed_arguments, process_facts, restart_count
from ds_trainer.monitor.report.history import HISTORY_NAME, STARTED, RunHistory, read_sessions, rounded
from ds_trainer.monitor.report.run_files import METRICS_NAME
from ds_trainer.monitor.throughput import PhaseClock
from ds_trainer.training.loop.training_run import TrainingRun
from ds_trainer.utils import distributed, failures
from ds_trainer.utils.errors import text_of
from ds_trainer.utils.exit_codes import code_of
from ds_trainer.utils.files import read_json
from ds_trainer.utils.host_memory import total_host_memory
from ds_trainer.utils.logging import CHECK, get_logger

logger = get_logger(__name__)

_MOST_MESSAGES = 300
_STEP = re.compile(r"[Ss]tep (\d+)")


class _Messages(logging.Handler):
    """Keeps warnings, errors and results of checks for the history."""

    def __init__(self, recorder: RunRecorder) -> None:
        super().__init__(logging.INFO)
        self._recorder = recorder
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        check = getattr(record, CHECK, None)
        if (record.levelno < logging.WARNING and check is None) or self._count >= _MOST_MESSAGES:
            return
        self._count += 1
        text = record.getMessage()
        match = _STEP.search(text)
        values = {"level": record.levelname, "text": text, "check": check, "step": int(match[1]) if match else None}
        self._recorder.message({name: value for name, value in values.items() if value is not None})


class RunRecorder:
    """Records the trainings of a Trainer.

    Args:
        events: arguments and state.
    """

    def __init__(self, events: TrainingEvents) -> None:
        self._events = events
        self._forget()

    def _forget(self) -> None:
        self._history: RunHistory | None = None
        self._clock: PhaseClock | None = None
        self._early: list[dict[str, Any]] = []
        self._called = time.time()
        self._ended = False
        self._owns_directory: Callable[[], bool] = lambda: False

    @contextmanager
    def recorded(self, owns_directory: Callable[[], bool]) -> Iterator[None]:
        """Context of a training: it ends with the report.

        Args:
            owns_directory: whether no other training can be writing to the output directory.
        """
        self._forget()
        self._owns_directory = owns_directory
        messages, package = _Messages(self), logging.getLogger("ds_trainer")
        package.addHandler(messages)
        try:
            with failures.before_exit(self._end_by_peer):
                yield
        except BaseException as error:
            self.end(error)
            raise
        else:
            self.end(None)
        finally:
            package.removeHandler(messages)
            if self._history is not None:
                self._history.close()

    def _end_by_peer(self, reason: str) -> None:
        self.end(None, reason)

    def message(self, values: dict[str, Any]) -> None:
        """Record a message of the log."""
        if self._history is None:
            self._early.append({"time": round(time.time(), 3), **values})
        else:
            self._history.add("message", values)

    # -- the training -------------------------------------------------------------------------------------------------

    def begin(self, summary: RunSummary, prediction: dict[str, Any] | None, run: TrainingRun) -> None:
        """Begin to record: the training has its engine and its output directory."""
        args, state = self._events.args, self._events.state
        if not (state.is_world_process_zero and args.run_report):
            return
        try:
            history = RunHistory(Path(str(args.output_dir)))
            if state.global_step == 0 and restart_count() == 0:
                history.start_new()
            self._record(history, self._start_facts(summary, prediction, run))
        except Exception:
            logger.warning("The run is not recorded for its report, because of an error.", exc_info=True)

    def _begin_at_the_end(self) -> None:
        """Begin to record a training that ends before it has an engine and a header.

        Files of an earlier run in the same directory stay: this is one more process. Nothing is written beside those of
        a run that may still be training.
        """
        args, state = self._events.args, self._events.state
        directory = Path(str(args.output_dir))
        if not (state.is_world_process_zero and args.run_report and directory.is_dir()):
            return
        has_run = any((directory / name).is_file() for name in (METRICS_NAME, HISTORY_NAME))
        if has_run and not self._owns_directory():
            return
        try:
            before = read_sessions(directory)
            facts = {**self._process_facts(), "step": before[-1].step if before else 0, STARTED: False}
            self._record(RunHistory(directory), facts)
        except Exception:
            logger.warning("The end of the run is not recorded, because of an error.", exc_info=True)

    def _record(self, history: RunHistory, facts: dict[str, Any]) -> None:
        self._history = history
        history.add("start", facts)
        early, self._early = self._early, []
        for values in early:
            history.add("message", values)

    def _process_facts(self) -> dict[str, Any]:
        args = self._events.args
        return {
            **process_facts(),
            "train_called": round(self._called, 3),
            "run_name": args.run_name,
            "seed": args.seed,
            "arguments": changed_arguments(args),
            "device_hour_price": args.report_device_hour_price,
        }

    def _start_facts(self, summary: RunSummary, prediction: dict[str, Any] | None, run: TrainingRun) -> dict[str, Any]:
        state, resumed = self._events.state, {}
        if summary.resumed_from is not None:
            resumed = {"resumed_from": summary.resumed_from, "resumed_written": _written(Path(summary.resumed_from))}
        return {
            "step": state.global_step,
            **resumed,
            **self._process_facts(),
            "header": [line.strip().split(None, 1) for line in header_lines(summary)[1:]],
            "summary": {name: value for name, value in asdict(summary).items() if name != "load"},
            "memory_limit_bytes": _memory_limit(run.device),
            "prediction": prediction,
            "order": _order(run),
        }

    def time_by(self, clock: PhaseClock) -> None:
        """Set the clock of the training."""
        self._clock = clock

    def progress(self) -> None:
        """Record the step. Called at every log; a log after the training, of an evaluation, renews the report."""
        if self._history is None:
            return
        if self._ended:
            self._write()
        else:
            self._history.progress(self._events.state.global_step, self._seconds())

    def _seconds(self) -> dict[str, float]:
        return {} if self._clock is None else self._clock.seconds()

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self, error: BaseException | None, why: str | None = None) -> None:
        """Record the end and write the report. Later calls do nothing.

        Args:
            error: what ends the training; None at its planned end.
            why: the reason, if it is no exception: a signal, a hang.
        """
        if self._ended:
            return
        if self._history is None and (error is not None or why is not None):
            self._begin_at_the_end()
        if self._history is None:
            return
        self._ended = True
        state = self._events.state
        try:
            values: dict[str, Any] = {"step": state.global_step, "seconds": rounded(self._seconds())}
            self._history.add("end", {**values, "epoch": state.epoch, **_ending(error, why)})
        except Exception:
            logger.error("The end of the run was not recorded, because of an error.", exc_info=True)
        self._write()

    def _write(self) -> None:
        try:
            from ds_trainer.monitor.report.writing import write_report  # not needed before the end of a run

            write_report(Path(str(self._events.args.output_dir)))
        except OSError as error:
            text = "The report of the run was not written (%s). `ds-trainer report %s` makes it from the run's files."
            logger.error(text, error, self._events.args.output_dir)
        except Exception:
            logger.error(
                "The report of the run was not written, because of an error. `ds-trainer report %s` makes it from the "
                "files of the run.",
                self._events.args.output_dir,
                exc_info=True,
            )


def _ending(error: BaseException | None, why: str | None) -> dict[str, Any]:
    if error is None:
        return {"outcome": "finished"} if why is None else {"outcome": "killed", "text": why}
    if (cause := failures.cause_of(error)) is not None:
        return {"outcome": "failed", "error": failures.PeerFailure.__name__, "text": cause}
    kind = type(error).__name__
    text = text_of(error).strip()
    if isinstance(error, SystemExit):
        stopped = hasattr(error, "checkpoint")
        code = code_of(error)
        return {"outcome": "stopped" if stopped else "failed", "error": kind, "text": text, "exit_code": code}
    if isinstance(error, KeyboardInterrupt):
        return {"outcome": "killed", "error": kind, "text": "interrupted (Ctrl-C)"}
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)[-6:])
    outcome = "diverged" if kind == "TrainingDiverged" else "failed"
    return {"outcome": outcome, "error": kind, "text": text, "trace": trace}


def _written(checkpoint: Path) -> float | None:
    """When a checkpoint was written, seconds since 1970."""
    try:
        manifest: Mapping[str, Any] = read_json(checkpoint / MANIFEST_FILE)
    except (OSError, ValueError):  # imported from another format
        return None
    written = manifest.get("written")
    return float(written) if isinstance(written, (int, float)) else None


def _memory_limit(device: torch.device) -> int:
    """Bytes of the device; of a CPU, the part of the machine's memory that each rank on it can take."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or distributed.world_size()
    return total_host_memory() // max(1, ranks)


def _order(run: TrainingRun) -> dict[str, Any] | None:
    """What the order of the samples follows from; None if it is not that of a seed and an epoch alone."""
    batches = run.loader.batch_sampler if isinstance(run.loader, PlannedLoader) else None
    if not isinstance(batches, DistributedBatchSampler) or batches.order is not None:
        return None
    return {
        "samples": batches.samples,
        "seed": batches.seed,
        "shuffle": batches.shuffle,
        "steps_per_epoch": run.plan.steps_per_epoch,
        "samples_per_step": run.batch_plan.global_batch_size,
    }
