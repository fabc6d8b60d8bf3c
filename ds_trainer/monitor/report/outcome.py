"""Whether a run did its work, in a word and a sentence."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from typing import Any

import psutil

from ds_trainer.monitor.report.history import STARTED, Session
from ds_trainer.monitor.report.run_files import RunFiles, is_number
from ds_trainer.utils.units import counted


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        state: ``finished``, ``stopped``, ``failed``, ``diverged``, ``killed``, ``running`` or ``unknown``.
        text: one sentence.
        details: the traceback or the whole message; empty without.
        exit_code: if it is known.
    """

    state: str
    text: str
    details: str = ""
    exit_code: int | None = None


def outcome_of(files: RunFiles) -> RunOutcome:
    """The outcome of a run, from its files."""
    step, planned = files.last_step, files.summary.get("max_steps")
    where = f"step {step:,} of {planned:,}" if is_number(planned) else f"step {step:,}"
    if not files.sessions:
        if any("train_runtime" in record and files.loss_name not in record for record in files.records):
            return RunOutcome("finished", f"The training ended at {where}.")
        return RunOutcome("unknown", f"The last record is of {where}; the run has no history that says how it ended.")
    session = files.sessions[-1]
    end = session.end
    if end is None:
        host = session.start.get("host")
        if is_alive(session):
            return RunOutcome("running", f"The run is training; the last record is of {where}.")
        if host != socket.gethostname():
            return RunOutcome("unknown", f"It trains on {host} or was killed there; the last record is of {where}.")
        return RunOutcome(
            "killed",
            f"The process was killed after {where}: it left no word about its end (SIGKILL, out of host memory, or the "
            "machine went down).",
        )
    text, error = str(end.get("text") or ""), str(end.get("error") or "")
    state = str(end.get("outcome") or "unknown")
    at = f"at {where}" if session.start.get(STARTED, True) else "before its first step"
    first = text.splitlines()[0] if text else ""
    if state == "finished":
        return _finished(files, where)
    if state == "stopped":
        return RunOutcome(state, text or f"Stopped {at}.", exit_code=end.get("exit_code"))
    if state == "killed":
        return RunOutcome(state, f"Killed {at}: {text}.")
    if state == "diverged":
        return RunOutcome(state, f"Diverged {at}: {first}", text)
    return RunOutcome(state, f"Failed {at}: {error}: {first}".rstrip(": "), str(end.get("trace") or text))


def _finished(files: RunFiles, where: str) -> RunOutcome:
    broken = files.not_finite(files.loss_name)
    loss = files.curve(files.loss_name)
    if broken and (not loss or broken[-1] > loss[-1][0]):
        return RunOutcome(
            "diverged", f"The training ended at {where}, but its loss is not finite since step {broken[0]:g}."
        )
    planned = files.summary.get("max_steps")
    if isinstance(planned, int) and files.last_step < planned:
        return RunOutcome("finished", f"A callback ended the training at {where}.")
    return RunOutcome("finished", f"All planned steps are done ({where}).")


def is_alive(session: Session) -> bool:
    """Whether the process of ``session`` runs. On another machine that is not known: False."""
    pid, host, began = (session.start.get(name) for name in ("pid", "host", "time"))
    if session.end is not None or host != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= float(began or math.inf)
    except psutil.Error:
        return False


def incidents_of(files: RunFiles) -> list[dict[str, Any]]:
    """Warnings, errors, restarts and rollbacks of all processes, oldest first: time, kind, text."""
    incidents: list[dict[str, Any]] = []
    for number, session in enumerate(files.sessions):
        if number:
            before = files.sessions[number - 1]
            repeated = max(0, before.step - session.first_step)
            text = f"Restarted from step {session.first_step:,}" + (
                f"; {counted(repeated, 'step')} after it are repeated" if repeated else ""
            )
            text = text if session.start.get(STARTED, True) else "Another process began, and did not reach a step"
            incidents.append(
                {"time": session.start.get("time"), "kind": "restart", "text": text, "step": session.first_step}
            )
        incidents += [
            {
                "time": message.get("time"),
                "kind": str(message.get("level", "warning")).lower(),
                "text": message.get("text"),
                "step": message.get("step"),
            }
            for message in session.messages
            if message.get("check") is None
        ]
        if session.end is not None and session.end.get("outcome") != "finished":
            end = session.end
            text = f"{end.get('error') or ''}: {end.get('text') or ''}".strip(": ")
            incidents.append(
                {"time": end.get("time"), "kind": str(end.get("outcome")), "text": text, "step": end.get("step")}
            )
    for record in files.records:
        if is_number(record.get("rolled_back_from_step")):
            text = f"Rolled back from step {record['rolled_back_from_step']:g} to {record['rolled_back_to_step']:g}"
            incidents.append({"time": None, "kind": "rollback", "text": text, "step": record.get("step")})
    return incidents


def checks_of(files: RunFiles) -> list[dict[str, Any]]:
    """What was proven: the check, its result with its numbers."""
    checks: list[dict[str, Any]] = []
    weights = files.summary.get("weights")
    if weights:
        checks.append({"check": "weights", "text": weights})
    seen = set()
    for session in files.sessions:
        for message in session.messages:
            if message.get("check") and (message["check"], message.get("text")) not in seen:
                seen.add((message["check"], message.get("text")))
                checks.append({"check": message["check"], "text": message.get("text")})
    for session in files.sessions:
        if session.start.get("resumed_from"):
            text = f"continued from {session.start['resumed_from']}, step {session.first_step:,}"
            checks.append({"check": "resume", "text": text})
    return checks
