"""Variables for other machines: which are passed on, and that they arrive unchanged in a remote shell."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
from deepspeed.launcher.multinode_runner import PDSHRunner
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.launching.commands import default_exports, env_file_text, read_env_files
from ds_trainer.launching.launch_request import read_exports
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
def test_every_exported_value_arrives_unchanged(value: str) -> None:
    assert through_deepspeed(env_file_text({"A": "1", "X": value}), "X") == value


def test_without_escaping_a_value_is_expanded() -> None:
    """The control: without escaping, the remote shell expands it."""
    assert through_deepspeed("X=$((1+1)) a\n", "X") == "2 a"


def test_values_that_cannot_be_passed_are_rejected() -> None:
    with pytest.raises(ConfigError, match="A, B: pdsh cannot pass"):
        env_file_text({"A": " x", "B": "x\ny", "C": "x y"})


def test_the_file_of_the_user_is_merged_without_its_comments(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=1\nB=2\n"), (here, "# mine\n\nB=3=4\n")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)
    assert read_env_files({}, [home, here]) == {"A": "1", "B": "3=4"}
    (home / "other").write_text("C=5\n")
    assert read_env_files({"DS_ENV_FILE": "other"}, [home, here]) == {"C": "5"}
    (here / ".deepspeed_env").write_text("A\n")
    with pytest.raises(ConfigError, match="deepspeed_env:1: 'A' is not of the form KEY=VALUE"):
        read_env_files({}, [home, here])


def test_secrets_are_sent_only_on_request() -> None:
    environment = {"HF_TOKEN": "s", "HF_HOME": "/h", "NCCL_DEBUG": "INFO", "PATH": "/bin", "DS_ENV_FILE": "x"}
    caches = {"TRITON_CACHE_DIR": "/t", "TORCHINDUCTOR_CACHE_DIR": "/i"}
    assert default_exports(environment | caches) == {"HF_HOME": "/h", "NCCL_DEBUG": "INFO", **caches}
    assert read_exports(["HF_TOKEN", "A=b=c", "E="], environment) == {"HF_TOKEN": "s", "A": "b=c", "E": ""}


@pytest.mark.parametrize("export", ["ABSENT", "a-b=1", "=1", "A=1\n2"])
def test_wrong_exports(export: str) -> None:
    with pytest.raises(ConfigError, match="launch --env"):
        read_exports([export], {})
