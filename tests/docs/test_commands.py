"""Every command that README and the pages print: it runs as it is printed, or a table says why not.

A block runs in a directory of its own with the files that it names (``workshop``), one command after the other. Words
in capitals and names of models are files of these names.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ds_trainer.cli.main import parse
from tests.docs.workshop import make_workshop
from tests.examples.conftest import ROOT, environment
from tests.support.shell import Shell

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Why a command is not run here. The first row that matches counts; the others run.
NOT_HERE = {
    r"pip install ": "installs packages, which tests must not",
    r"(srun|sbatch) ": "needs SLURM; tests/cluster runs jobs under one",
    r"\S.* (\[|\.\.\.)": "a pattern, not a command",
    r"launch/quickstart\.sh": "makes a virtual environment; .ci/run runs it",
    r"python benchmarks/": "takes minutes on a machine that does nothing else; tests/benchmarks runs a small one",
    r"(torchrun|deepspeed).* (-m ds_trainer|--module)": "needs 8 GPUs; tests/as_transformers has 2 ranks",
    r"torchrun --nproc-per-node 8 ": "needs 8 GPUs, and fails on purpose; tests/resilience has 2 ranks",
    r"torchrun --nproc-per-node 2 examples/": "tests/examples/test_tutorial.py runs it on forked ranks",
    r"ds-trainer run .*--nproc-per-node 8": "needs 8 GPUs; tests/as_transformers has 2 ranks",
    r"ds-trainer run .*--hostfile": "needs two machines; tests/cluster has two",
    r"ds-trainer ((init|train) lora\.yaml|chat runs/lora-merged)": "needs the Hub; else init writes no file",
    r"ds-trainer (train chat\.yaml|chat runs/chat )": "trains for minutes on 1,500 conversations",
    r"ds-trainer init$": "asks in a terminal; tests/cli/test_init.py answers",
    r"ds-trainer plan .* --this-machine": "needs a GPU",
    r"ds-trainer plan .* --probe": "measures a GPU",
    r"ds-trainer checkpoint export .* --merge-lora": "of a run with adapters; tests/checkpoint/export has one",
    r"ds-trainer checkpoint convert DIR/checkpoint-N ": "N is the number that the command above it prints",
    r"ds-trainer train RECIPE --profile 5": "tests/training/loop/test_step_profiler.py runs it",
    r"ds-trainer profile RECIPE": "tests/cli/test_train.py runs it",
}  # fmt: skip
# Blocks whose commands are alternatives: each has the directory as it was.
ALTERNATIVES = ("docs/explanation/checkpoints.md", "docs/how-to/run-unchanged-scripts.md", "docs/how-to/chat.md")
# What makes the files that a page names and another page makes itself.
BEFORE = {
    "docs/how-to/doctor.md": "cp -r NAME DIR",
    "docs/how-to/loading.md": "cp -r NAME DIR",
    "docs/how-to/run-unchanged-scripts.md": "cp script.py train.py",
}
# What a command answers that does not end with 0.
CODES = {
    "ds-trainer plan Llama-3.1-70B/ --seq-len 8K --global-batch 128 --host-memory 1000 --offload-to cpu | head -12": 3,
}


_COMMAND = re.compile(r"^(ds-trainer|torchrun|deepspeed|python|pip|sbatch|srun|launch/\S+) ", re.MULTILINE)


class Block(NamedTuple):
    """The commands between two fences."""

    page: str
    line: int
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def commands_of(text: str) -> tuple[str, ...]:
    """The commands of a block: continued lines joined, without comments and prompts."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [re.sub(r"(^|\s)#.*", "", line.strip().removeprefix("$ ")).strip() for line in joined.splitlines()]
    return tuple(line for line in lines if line)


def blocks() -> list[Block]:
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            line, words = text[: match.start()].count("\n") + 1, match[2]
            if match[1] not in ("bash", "sh", "shell", "console"):  # what a program prints, and perhaps its command
                assert not _COMMAND.search(words), f"{path}:{line} has commands without a prompt in a block of text"
                words = "\n".join(re.findall(r"^ *\$ .*", words, re.MULTILINE))
            found += [Block(str(path.relative_to(ROOT)), line, commands_of(words))] if words else []
    return found


def reason(command: str) -> str:
    """Why ``command`` is not run here; empty if it is."""
    return next((why for pattern, why in NOT_HERE.items() if re.match(pattern, command)), "")


BLOCKS = blocks()
COMMANDS = sorted({command for block in BLOCKS for command in block.commands})


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("shell")
    made = Shell(folder, {**environment(), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HOME": str(folder)})
    yield made
    made.close()


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, shell: Shell) -> Path:
    return make_workshop(tmp_path_factory.mktemp("workshop") / "files", shell)


def test_there_are_commands_and_every_reason_is_needed() -> None:
    assert len(COMMANDS) > 60
    assert [pattern for pattern in NOT_HERE if not any(re.match(pattern, one) for one in COMMANDS)] == []
    assert sum(not reason(command) for command in COMMANDS) > 40


@pytest.mark.parametrize("command", [one for one in COMMANDS if "..." not in one and "ds-trainer " in one])
def test_the_command_parses(command: str) -> None:
    """With the parser of the command line: options that are not there any more are refused."""
    words = shlex.split(re.sub(r"[|<>]\s.*", "", command[command.index("ds-trainer ") :]))
    options, rest = parse(words[1:])
    assert options.subcommand == words[1]
    assert all(word.startswith("--") or number for number, word in enumerate(rest))


@pytest.mark.parametrize("path", sorted({re.split(r"[ =]", one)[1] for one in COMMANDS if one.startswith("python ")}))
def test_the_script_exists(path: str) -> None:
    assert path in ("-c", "train.py") or (ROOT / path).is_file()


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("block", [one for one in BLOCKS if not all(map(reason, one.commands))], ids=str)
def test_the_commands_run_as_printed(block: Block, workshop: Path, shell: Shell, tmp_path: Path) -> None:
    directory = tmp_path / "all"
    shutil.copytree(workshop, directory, symlinks=True)
    wrong = []
    if block.page in BEFORE:
        assert shell.run(BEFORE[block.page], directory).returncode == 0
    for number, command in enumerate(block.commands):
        if reason(command):
            continue
        if block.page in ALTERNATIVES:
            directory = tmp_path / str(number)
            shutil.copytree(tmp_path / "all", directory, symlinks=True)
        done = shell.run(command, directory)
        said = f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        if done.returncode != CODES.get(command, 0) or "Traceback" in said:
            wrong.append(said)
    assert not wrong, "\n\n".join(wrong)
