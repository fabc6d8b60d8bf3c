"""``Shell``: runs command lines with ``bash``; their Python programs are forked from one that has imported everything.

A start of Python with torch costs seconds. So ``ds-trainer`` and ``python`` are small programs first on ``PATH`` that
hand their arguments, directory, variables and open files to a server, and end with the exit code that it answers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import threading
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from tests.support.pool import _PRELOADED

_CLIENT = f"""#!{sys.executable} -SE
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["DS_TRAINER_TEST_SHELL"])
request = json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
connection.sendall(request)
sys.exit(int(connection.recv(16) or b"1"))
"""


class Shell:
    """``run(line, directory)`` in ``bash``.

    Args:
        folder: for the programs and the socket.
        variables: environment of the commands, besides the path.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        for name in ("ds-trainer", "python"):
            (folder / name).write_text(_CLIENT)
            (folder / name).chmod(0o755)
        self._variables = {
            **variables,
            "PATH": f"{folder}{os.pathsep}{variables['PATH']}",
            "DS_TRAINER_TEST_SHELL": str(folder / "socket"),
        }
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(folder / "socket"))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def run(self, line: str, directory: Path, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Run the line with a question as its input, and stop it after ``seconds``."""
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            cwd=directory,
            env=self._variables,
            input="What is ZeRO?\n",
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def close(self) -> None:
        """Take no more commands."""
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    with connection:
        head, files, _, _ = socket.recv_fds(connection, 8, 3)
        size, request = int.from_bytes(head, "big"), b""
        while len(request) < size:
            request += connection.recv(size - len(request))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        process = context.Process(target=_run, args=(*json.loads(request), [DupFd(file) for file in files]))
        process.start()
        for file in files:
            os.close(file)
        process.join()
        connection.sendall(str(process.exitcode).encode())


def _run(program: str, words: list[str], directory: str, variables: dict[str, str], files: list[Any]) -> None:
    for number, file in enumerate(files):
        os.dup2(file.detach(), number)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - the process ends
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    if program == "ds-trainer":
        from ds_trainer.cli.main import main

        sys.argv = [program, *words]
        sys.exit(main())
    if words[0] == "-c":
        sys.argv = words
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
