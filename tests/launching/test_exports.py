"""Variables for other machines: what is passed on, and that a remote shell gets it as it was."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
from deepspeed.launcher.multinode_runner import PDSHRunner
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.launching.exports import env_file_text, users_env_files, usual_exports
from ds_trainer.launching.request import read_exports
from ds_trainer.utils.errors import ConfigError


def through_deepspeed(text: str, name: str) -> str:
    """What a remote shell would print of ``name``: DeepSpeed's own reading and quoting, then bash."""
    runner = PDSHRunner(Namespace(user_script="x", user_args=[]), "")
    for line in text.splitlines(keepends=True):
        runner.add_export(*line.split("=", maxsplit=1))
    exports = "".join(f"export {key}={value}; " for key, value in runner.exports.items())
    command = exports.replace("%%", "%") + f'printf %s "${name}"'  # pdsh halves them
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.strip))
def test_every_value_arrives_as_it_was(value: str) -> None:
    assert through_deepspeed(env_file_text({"A": "1", "X": value}), "X") == value


def test_what_deepspeed_alone_makes_of_a_value() -> None:
    """The control: without escaping, the remote shell expands it."""
    assert through_deepspeed("X=$((1+1)) a\n", "X") == "2 a"


def test_values_that_cannot_arrive_are_refused() -> None:
    with pytest.raises(ConfigError, match="A, B: a value with blanks"):
        env_file_text({"A": " x", "B": "x\ny", "C": "x y"})


def test_the_users_own_file_is_merged_without_its_comments(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=1\nB=2\n"), (here, "# mine\n\nB=3=4\n")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)
    assert users_env_files({}, [home, here]) == {"A": "1", "B": "3=4"}
    (home / "other").write_text("C=5\n")
    assert users_env_files({"DS_ENV_FILE": "other"}, [home, here]) == {"C": "5"}
    (here / ".deepspeed_env").write_text("A\n")
    with pytest.raises(ConfigError, match="deepspeed_env:1: 'A' is not of the form KEY=VALUE"):
        users_env_files({}, [home, here])


def test_secrets_are_not_sent_unasked() -> None:
    environment = {"HF_TOKEN": "s", "HF_HOME": "/h", "NCCL_DEBUG": "INFO", "PATH": "/bin", "DS_ENV_FILE": "x"}
    assert usual_exports(environment) == {"HF_HOME": "/h", "NCCL_DEBUG": "INFO"}
    assert read_exports(["HF_TOKEN", "A=b=c", "E="], environment) == {"HF_TOKEN": "s", "A": "b=c", "E": ""}


@pytest.mark.parametrize("word", ["ABSENT", "a-b=1", "=1", "A=1\n2"])
def test_wrong_exports(word: str) -> None:
    with pytest.raises(ConfigError, match="launch --env"):
        read_exports([word], {})
