"""Machines to try launchers on: a login node and nodes under SLURM, made of namespaces by ``cluster.sh``.

The cluster is a child of the tests and ends with them, however they end: it stays up as long as somebody holds the
other side of its standard input. Files are shared by all its machines and by the tests, except ``/run`` and
``/dev/shm``; networks, host names and processes are each machine's own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "cluster.sh"
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
}
_NAMESPACES = ("--mount", "--pid", "--uts", "--net")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")


def why_not() -> str | None:
    """What this machine lacks to hold a cluster; None where it can."""
    if sys.platform != "linux":
        return "namespaces need Linux"
    if os.geteuid() != 0:
        return "making namespaces needs root"
    missing = [package for command, package in PACKAGES.items() if shutil.which(command, path=_PATH) is None]
    if missing:
        return f"not installed: {' '.join(sorted(missing))}"
    tried = subprocess.run(["unshare", *_NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"no right to make namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Cluster:
    """A running cluster; ``close`` ends it.

    Args:
        folder: for what its daemons write.
        nodes: how many.

    Attributes:
        folder: what its daemons write; shared by all machines.
        nodes: names of the nodes, ``node1`` and on. The login node is ``hub``.

    Raises:
        RuntimeError: it did not come up; the text says what its script printed.
    """

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        errors = folder / "cluster.log"
        command = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*command, str(SCRIPT), "run", str(folder), str(nodes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd="/",
            )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"up\n":
            self.close()
            raise RuntimeError(f"the cluster did not come up: {errors.read_text(encoding='utf-8')}")
        self._first = _only_child(self._process.pid)

    @property
    def process(self) -> int:
        """The process outside that holds the cluster."""
        return self._process.pid

    def close(self) -> None:
        """End the cluster with all its processes. Ends within seconds; a second call does nothing."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    # -- commands on its machines ------------------------------------------------------------------------------------

    def command(self, machine: str, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """The words that run ``argv`` on ``hub`` or a node, for subprocess."""
        inside = ["bash", "-c", 'cd "$0" && exec "$@"', str(cwd or self.folder), *argv]
        if machine != "hub":
            inside = ["bash", "-c", f'exec {_enter(f"$(cat /run/node/{machine})")} "$@"', machine, *inside]
        return [*_enter(str(self._first)).split(), *inside]

    def run(
        self,
        machine: str,
        *argv: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine and wait for it. ``env`` is added to a bare environment.

        Raises:
            AssertionError: it failed and ``check`` is on; the text has its output.
        """
        completed = subprocess.run(
            self.command(machine, argv, cwd),
            capture_output=True,
            text=True,
            env={"PATH": _PATH, "HOME": str(self.folder), "LANG": "C.UTF-8", **(env or {})},
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
        if check:
            assert completed.returncode == 0, (
                f"{argv} on {machine}: {completed.returncode}\n{completed.stdout}\n{completed.stderr}"
            )
        return completed

    def hub(self, *argv: str, **options: object) -> str:
        """What a command prints on the login node."""
        return self.run("hub", *argv, **options).stdout.strip()  # type: ignore[arg-type]

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
        """``sbatch`` with these words; gives the number of the job."""
        return int(self.hub("sbatch", "--parsable", *argv, cwd=cwd, env=env))

    def job(self, job: int) -> dict[str, str]:
        """What ``scontrol show job`` says: ``JobState``, ``Restarts``, ``ExitCode``, ``Reason`` ..."""
        fields: list[str] = []
        while len(fields) < 2:  # on a busy machine a command of SLURM may be ended by its broken connection (SIGPIPE)
            shown = self.run("hub", "scontrol", "--oneliner", "show", "job", str(job), check=False)
            assert shown.returncode in (0, -signal.SIGPIPE), shown.stderr
            fields = shown.stdout.strip().split(" ")
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait_until(self, what: Callable[[], object], timeout: float, about: Callable[[], str] = str) -> None:
        """Wait until ``what`` gives something true.

        Raises:
            AssertionError: it did not within ``timeout`` seconds; the text is ``about()``.
        """
        deadline = time.monotonic() + timeout
        while not what():
            assert time.monotonic() < deadline, about()
            time.sleep(0.2)

    def wait_for(self, job: int, timeout: float, log: Path | None = None) -> dict[str, str]:
        """Wait for the end of a job; what :meth:`job` says then.

        Raises:
            AssertionError: it did not end within ``timeout`` seconds; the text has the end of ``log``.
        """
        job_state: dict[str, str] = {}

        def ended() -> bool:
            job_state.update(self.job(job))
            return job_state["JobState"] in FINAL

        def state() -> str:
            written = log.read_text(encoding="utf-8", errors="replace")[-4000:] if log and log.exists() else ""
            return f"job {job} is {job_state}\n{written}"

        self.wait_until(ended, timeout, state)
        return job_state

    # -- accidents ---------------------------------------------------------------------------------------------------

    def crash(self, node: str) -> None:
        """A power cut: every process of the node dies at once and its network is gone."""
        # The first process of a namespace is dead once all others are; until then its ports answer.
        wait = "while grep -q '^State:[[:space:]]*[^ZX[:space:]]' /proc/$first/status 2>/dev/null; do sleep 0.02; done"
        self.run("hub", "bash", "-c", f"first=$(cat /run/node/{node}); kill -KILL $first; {wait}")

    def boot(self, node: str) -> None:
        """Start a node again after a crash. It reports to SLURM by itself."""
        self.run("hub", str(SCRIPT), "boot", str(self.folder), node)


def _enter(process: str) -> str:
    return f"nsenter --target {process} {' '.join(_NAMESPACES)}"


def _only_child(process: int) -> int:
    return int(Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()[0])
