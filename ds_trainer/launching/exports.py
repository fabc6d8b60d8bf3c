"""Environment variables for ranks on other machines, and the ``.deepspeed_env`` file that exports them.

ssh passes no variables, so DeepSpeed's pdsh runner prefixes its command with ``export KEY=VALUE``. It exports variables
that begin with PYTHON (on GPUs also NCCL, never PATH) and those of the file. A blank line or a comment in the file ends
the launch with a traceback, and values are escaped neither for the remote shell nor for pdsh.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import exists, read_user_file

ENV_FILE_VARIABLE = "DS_ENV_FILE"
DEFAULT_ENV_FILE = ".deepspeed_env"
# What a training run reads from the environment. Secrets are excluded, since process lists show the values.
_NAMES = ("DS", "GLOO", "HF", "NCCL", "OMP", "TOKENIZERS", "TORCH", "TORCHINDUCTOR", "TRANSFORMERS", "TRITON")
_PREFIXES = tuple(f"{name}_" for name in _NAMES)
_SECRETS = ("KEY", "PASSWORD", "SECRET", "TOKEN")
_PLAIN = r"[\w@%+=:,./-]*"  # values that DeepSpeed does not quote


def default_exports(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environment`` to export to ranks on other machines; without secrets."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIXES)
        and name != ENV_FILE_VARIABLE
        and not (set(name.split("_")) & set(_SECRETS))
        and "\n" not in value
        and value == value.strip()
    }


def read_env_files(environment: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """The variables of ``.deepspeed_env`` (or of the file named by DS_ENV_FILE) in ``folders``; later folders take
    precedence. Blank lines and comments are ignored.

    Raises:
        ConfigError: a line is not ``KEY=VALUE``.
    """
    exports: dict[str, str] = {}
    problems = []
    name = environment.get(ENV_FILE_VARIABLE, DEFAULT_ENV_FILE)
    for path in dict.fromkeys(Path(os.path.expanduser(folder)) / name for folder in folders):
        if not exists(path):
            continue
        for number, line in enumerate(read_user_file(path, str(path), "file of variables").splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            key, equals, value = line.partition("=")
            if not equals or not key.strip().isidentifier():
                problems.append(f"{path}:{number}: {line!r} is not of the form KEY=VALUE.")
            exports[key.strip()] = value.strip()
    if problems:
        raise ConfigError(problems)
    return exports


def env_file_text(exports: Mapping[str, str]) -> str:
    """A ``.deepspeed_env`` that sets exactly ``exports`` in the remote shell of pdsh.

    Raises:
        ConfigError: a value has several lines, or leading or trailing whitespace, which DeepSpeed strips.
    """
    wrong = [name for name, value in exports.items() if value != value.strip() or "\n" in value]
    if wrong:
        raise ConfigError(
            f"launch: {', '.join(wrong)}: pdsh cannot pass a value with leading or trailing whitespace or several "
            "lines to other machines. Set it in the script."
        )
    return "".join(f"{name}={escape_env_value(value)}\n" for name, value in exports.items())


def escape_env_value(value: str) -> str:
    """``value`` escaped for the file. DeepSpeed double-quotes values with special characters; pdsh replaces ``%h``,
    ``%u`` and ``%n``.
    """
    if re.fullmatch(_PLAIN, value) is None:
        value = re.sub(r'([\\"$`])', r"\\\1", value)
    return value.replace("%", "%%")
