#!/usr/bin/env python3
"""Puts plausible mistakes into the code, one at a time, and prints the share that the tests notice.

    python tools/mutants.py                      all of them: an hour on two cores
    python tools/mutants.py --only loss          topics and names that match a regular expression
    python tools/mutants.py --list               print them
    python tools/mutants.py --check-anchors      does every mistake still find its place? A second

The mistakes are data: ``tools/mutants/TOPIC.yaml`` is a list of files, each with the tests that should notice and, by
name, the text to replace (which must occur once in the file) and its replacement::

    - file: ds_trainer/training/loop/loss_rule.py
      tests: tests/training/loop/test_loss_rule.py -k "not slow"
      mutants:
        a zero loss looks like a mean: ["> abs(once - twice)", ">= abs(once - twice)"]

Each mistake is made in a copy of the working tree. The tests run in a process that is forked from one that has torch,
deepspeed and transformers imported, so a run costs what its tests cost. The tests of a group run once without any
mistake first, and must pass.

Exit code: 0 where at least 95 percent are noticed, 1 where fewer are, 2 where a text is not found or tests fail without
a mistake.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LISTS = Path(__file__).resolve().parent / "mutants"
ENOUGH = 0.95
IMPORTED = ("torch", "deepspeed", "transformers.models.llama.modeling_llama", "pytest", "hypothesis", "numpy")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_TRAINER_TEST_START": "fork",  # tests/support/pool.py
    "DS_TRAINER_TEST_PROFILE": "mutants",  # tests/conftest.py
}


@dataclass(frozen=True)
class Mutant:
    """One mistake: ``old`` becomes ``new`` in ``file``, and ``tests`` should fail."""

    topic: str
    name: str
    file: str
    old: str
    new: str
    tests: str

    def problem(self) -> str:
        """Why it cannot be made; empty where it can."""
        path = ROOT / self.file
        if not path.is_file():
            return f"there is no {self.file}"
        text = path.read_text(encoding="utf-8")
        if self.old == self.new:
            return "it changes nothing"
        if (count := text.count(self.old)) != 1:
            near = difflib.get_close_matches(self.old.splitlines()[0].strip(), _stripped(text), 1, 0.3)
            return f"the text {self.old!r} is {count} times in {self.file}; the nearest line: {' '.join(near)}"
        missing = [word for word in shlex.split(self.tests) if _is_absent_test(word)]
        return f"there is no {', '.join(missing)}" if missing else ""


def _stripped(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def _is_absent_test(word: str) -> bool:
    return word.startswith("tests/") and not (ROOT / word.partition("::")[0]).exists()


def load() -> list[Mutant]:
    """All mistakes, in the order of the files."""
    import yaml

    found = []
    for path in sorted(LISTS.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            for name, (old, new) in entry["mutants"].items():
                found.append(Mutant(path.stem, name, entry["file"], old, new, entry["tests"]))
    names = [(mutant.topic, mutant.name) for mutant in found]
    twice = sorted({f"{topic}: {name}" for topic, name in names if names.count((topic, name)) > 1})
    if twice:
        sys.exit(f"two mistakes of one name: {', '.join(twice)}")
    return found


# -- a copy of the tree, and the process that runs tests in it ---------------------------------------------------------


def copy_tree(target: Path) -> None:
    """Every file that git knows or would add."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@contextlib.contextmanager
def made(mutant: Mutant, tree: Path) -> Iterator[None]:
    """The mistake is in ``tree`` inside the block. No compiled file of the module is valid then, and all are after."""
    path = tree / mutant.file
    original = path.read_bytes()
    before = path.stat()
    path.write_text(original.decode("utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
    os.utime(path, ns=(before.st_atime_ns, time.time_ns() + 10**12))
    try:
        yield
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Runner:
    """Runs tests in a copy of the tree, in forks of a process that has imported what takes long."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: str, limit: float) -> tuple[int | None, float, str]:
        """Exit code of pytest (None: it did not end within ``limit`` seconds), seconds, and the end of what it said."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([shlex.split(tests), limit]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the tests has ended")
        code, seconds, said = json.loads(line)
        return code, seconds, said

    def close(self) -> None:
        """Release the files."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Reads ``[tests, limit]`` in lines of JSON and answers with exit code, seconds and output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            __import__(name)
    for line in sys.stdin:
        tests, limit = json.loads(line)
        with tempfile.TemporaryFile() as output:
            began = time.monotonic()
            child = os.fork()
            if child == 0:
                _run_pytest(tests, output.fileno())
            code = _wait(child, began + limit)
            seconds = time.monotonic() - began
            output.seek(0)
            said = output.read().decode("utf-8", "replace")[-3000:]
        answers.write(json.dumps([code, seconds, said]) + "\n")
        answers.flush()


def _run_pytest(tests: Sequence[str], output: int) -> None:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import pytest

    code: Any = 3
    try:
        code = int(pytest.main([*tests, "-x", "-q", "--no-header", "-p", "no:cacheprovider"]))
    finally:
        sys.stdout.flush()
        import multiprocessing

        for process in multiprocessing.active_children():
            process.kill()
        os._exit(code)


def _wait(child: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _kill(child)  # what it left behind
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    _kill(child)
    os.waitpid(child, 0)
    return None


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


# -- all of them -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What the tests said of one mistake: noticed, not noticed, or why that is not known."""

    mutant: Mutant
    verdict: str
    seconds: float


def run_group(tests: str, mutants: Sequence[Mutant], runner: Runner, limit: float) -> Iterator[Result]:
    """All mistakes that the same tests should notice."""
    code, seconds, said = runner.run(tests, 10 * limit)
    if code != 0:
        print(f"without any mistake, {tests} ends with {code}:\n{said}", file=sys.stderr, flush=True)
        yield from (Result(mutant, "the tests fail without it", 0.0) for mutant in mutants)
        return
    for mutant in mutants:
        with made(mutant, runner.tree):
            code, seconds, said = runner.run(tests, max(limit, 5 * seconds))
        if code is None:
            verdict = "noticed: it hangs"
        elif code in (1, 2):
            verdict = "noticed"
        else:
            verdict = "not noticed" if code == 0 else f"pytest ends with {code}: {said}"
        yield Result(mutant, verdict, seconds)


def run_all(mutants: Sequence[Mutant], jobs: int, limit: float) -> list[Result]:
    """Run them; prints each result as it comes."""
    groups: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        groups[mutant.tests].append(mutant)
    waiting: queue.SimpleQueue[tuple[str, list[Mutant]]] = queue.SimpleQueue()
    for group in sorted(groups.items(), key=lambda item: -len(item[1])):
        waiting.put(group)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:

        def work(number: int) -> None:
            tree = Path(folder, str(number))
            copy_tree(tree)
            runner = Runner(tree)
            while True:
                try:
                    tests, group = waiting.get_nowait()
                except queue.Empty:
                    break
                for result in run_group(tests, group, runner, limit):
                    results.append(result)
                    print(
                        f"{result.verdict:<12} {result.seconds:6.1f} s  {result.mutant.topic}: {result.mutant.name}",
                        flush=True,
                    )
            runner.close()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(min(jobs, len(groups)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def report(results: Sequence[Result]) -> int:
    """The share that is noticed, by topic and in all; the exit code."""
    by_topic: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_topic[result.mutant.topic].append(result)
    print(f"\n{'topic':<14} mistakes  noticed")
    for topic, those in sorted(by_topic.items()):
        print(f"{topic:<14} {len(those):>8}  {_share(those):>7.1%}")
    print(f"{'all':<14} {len(results):>8}  {_share(results):>7.1%}")
    if any(not result.verdict.startswith(("noticed", "not noticed")) for result in results):
        return 2
    return 0 if _share(results) >= ENOUGH else 1


def _share(results: Sequence[Result]) -> float:
    return sum(result.verdict.startswith("noticed") for result in results) / max(1, len(results))


def main(words: Sequence[str] | None = None) -> int:
    """Run the check; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="regular expression that 'topic: name' must match")
    parser.add_argument("--list", action="store_true", help="print the mistakes and end")
    parser.add_argument("--check-anchors", action="store_true", help="look whether each can be made, and end")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that run tests at the same time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds from which on tests count as hanging")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.serve:
        serve()
        return 0
    mutants = [mutant for mutant in load() if re.search(given.only, f"{mutant.topic}: {mutant.name}")]
    stale = [(mutant, problem) for mutant in mutants if (problem := mutant.problem())]
    for mutant, problem in stale:
        print(f"{mutant.topic}: {mutant.name}: {problem}", file=sys.stderr)
    if given.list:
        for mutant in mutants:
            print(f"{mutant.topic}: {mutant.name} ({mutant.file}; {mutant.tests})")
    if given.list or given.check_anchors or stale:
        print(f"{len(mutants)} mistakes, {len(stale)} of them cannot be made")
        return 2 if stale else 0
    return report(run_all(mutants, given.jobs, given.timeout))


if __name__ == "__main__":
    sys.exit(main())
