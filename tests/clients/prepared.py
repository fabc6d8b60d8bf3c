"""A process that has imported the libraries once, and forks the ranks of many runs from itself.

``python -m tests.clients.prepared ds_trainer`` (or ``transformers``) reads requests, one JSON object a line:
``command`` (a script and its arguments), ``settings`` (values of ``--set``), ``ranks``, ``port``, ``folder`` (for the
output of the ranks) and ``seconds``. It answers with the exit codes of the ranks, in order. Imports take most of the
time of a run.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

_LIBRARIES = (
    *("torch", "datasets", "peft", "transformers", "transformers.trainer", "transformers.trainer_seq2seq"),
    *("transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"),
    *("trl", "trl.trainer.sft_trainer", "sentence_transformers", "sklearn.linear_model"),
)
_ENGINE = ("deepspeed", "ds_trainer.training.trainer", "deepspeed.runtime.zero.muon.muon_optimizer")
_PATIENCE = 20.0  # seconds that the other ranks have after one has failed


def serve(kind: str) -> None:
    """Import, then answer requests until the input ends. A forked rank returns from here with ``SystemExit``."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print when they are imported
    if kind == "ds_trainer":
        from ds_trainer.compatibility.replacement import replace_transformers

        replace_transformers()
    for name in (*_LIBRARIES, *(_ENGINE if kind == "ds_trainer" else ())):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        ranks = {}
        for rank in range(request["ranks"]):
            process = os.fork()
            if process == 0:
                _become(rank, request)
                sys.exit(_run(kind, request))
            ranks[process] = rank
        answers.write(json.dumps(_wait(ranks, request["seconds"])) + "\n")
        answers.flush()


def _become(rank: int, request: dict[str, Any]) -> None:
    if request["ranks"] > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(request["ranks"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(request["port"]),
        )
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(Path(request["folder"], f"{rank}.{name}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _run(kind: str, request: dict[str, Any]) -> int | str | None:
    if kind == "ds_trainer":
        from ds_trainer.cli.main import main

        settings = [part for setting in request["settings"] for part in ("--set", setting)]
        return main(["run", *settings, *request["command"]])
    sys.argv = request["command"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def _wait(ranks: dict[int, int], seconds: float) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(ranks):
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in ranks:
            codes[ranks[process]] = os.waitstatus_to_exitcode(status)
            if codes[ranks[process]]:
                deadline = min(deadline, time.monotonic() + _PATIENCE)
        elif time.monotonic() > deadline:
            for each in (each for each, rank in ranks.items() if rank not in codes):
                os.kill(each, signal.SIGKILL)
            time.sleep(0.2)
        else:
            time.sleep(0.02)
    return [codes[rank] for rank in range(len(ranks))]


if __name__ == "__main__":
    serve(sys.argv[1])
