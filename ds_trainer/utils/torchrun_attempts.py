"""Under ``torchrun --max-restarts``, an error of the program ends the job instead of coming back with every attempt.

torchrun restarts its ranks after every exit code but 0, and no rank can tell it not to. So a rank whose error another
start would repeat (:mod:`ds_trainer.utils.exit_codes`) writes it down beside torchrun's error file of the attempt. A
rank of a later attempt that finds such a file on its machine ends at once when it imports this package, with the same
message and exit code, before torch or the model is loaded. A rank that another one's error has ended writes it down
too, so this holds on all machines.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ds_trainer.utils.errors import text_of
from ds_trainer.utils.exit_codes import Restart, code_of, row_of
from ds_trainer.utils.units import whole_number

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # DIRECTORY/attempt_N/LOCAL_RANK/error.json
_NAME = "final.json"


def follow_attempts(environment: Mapping[str, str] = os.environ) -> None:
    """End this process if an earlier attempt has ended with an error that this one would repeat.

    Otherwise an exception that ends this process is written down. Without torchrun, or without restarts, nothing is
    done.
    """
    attempt = _attempt(environment)
    if attempt is None:
        return
    number = int(attempt.parent.name.partition("_")[2])
    for path in sorted(attempt.parent.parent.glob(f"attempt_*/*/{_NAME}")):
        if int(path.parents[1].name.partition("_")[2]) < number:
            final = json.loads(path.read_text(encoding="utf-8"))
            text = f"attempt {number} of torchrun ends at once, since another start would repeat: {final['text']}"
            print(f"ds_trainer: {text}", file=sys.stderr, flush=True)
            summary = json.dumps({"message": text, "timestamp": int(time.time())})  # torchrun's last words are of it
            Path(environment[_ERROR_FILE]).write_text(summary, encoding="utf-8")
            raise SystemExit(final["exit_code"])
    sys.excepthook = _recording(sys.excepthook)


def record_final(exit_code: int, text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Write down, if the job is torchrun's, that this rank ends with ``exit_code`` because of ``text``.

    Exit codes after which another start may go well are not written down.
    """
    attempt = _attempt(environment)
    if attempt is not None and row_of(exit_code).restart is Restart.NEVER:
        from ds_trainer.utils.outcomes import recording  # it needs files, which imports this module

        with recording("that another attempt would repeat this error"):
            partial = attempt / f"{_NAME}.partial"
            partial.write_text(json.dumps({"exit_code": exit_code, "text": text}), encoding="utf-8")
            partial.replace(attempt / _NAME)


def _attempt(environment: Mapping[str, str]) -> Path | None:
    """The folder of this rank in this attempt of torchrun; None without one, or if torchrun would not restart."""
    folder = Path(environment.get(_ERROR_FILE, "")).parent
    restarts = whole_number(environment.get("TORCHELASTIC_MAX_RESTARTS", ""))
    if not (restarts and re.fullmatch(r"attempt_\d+", folder.parent.name)):
        return None
    return folder if _is_rank() and folder.is_dir() else None


def _is_rank() -> bool:
    """Whether torchrun's agent has started this process: the environment of its children is inherited by theirs."""
    try:
        return f"{_ERROR_FILE}=".encode() not in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:  # not Linux
        return False


def _recording(hook: Callable[..., Any]) -> Callable[..., Any]:
    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            of_peer = kind.__name__ == "PeerFailure"  # its text names the rank and the error
            record_final(code_of(error), str(error) if of_peer else f"{kind.__name__}: {text_of(error)}")
        hook(kind, error, trace)

    return record
