"""Variables for ranks on other machines, and the ``.deepspeed_env`` that carries them there.

ssh hands nothing on, so DeepSpeed's pdsh runner writes ``export KEY=VALUE`` before its command. It takes variables that
begin with PYTHON (on GPUs NCCL as well, never PATH), and those of the file: a blank line or a comment in it ends the
launch with a traceback, and values are neither escaped for the remote shell nor for pdsh.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_trainer.utils.errors import ConfigError

ENV_FILE_VARIABLE = "DS_ENV_FILE"
USUAL_ENV_FILE = ".deepspeed_env"
# What a training reads that is set beside the launch, as far as it is no secret: it is seen in lists of processes.
_PREFIXES = ("DS_", "GLOO_", "HF_", "NCCL_", "OMP_", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_")
_SECRETS = ("KEY", "PASSWORD", "SECRET", "TOKEN")
_PLAIN = r"[\w@%+=:,./-]*"  # what DeepSpeed leaves without quotes


def usual_exports(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environment`` that ranks elsewhere should see, secrets excepted."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIXES)
        and name != ENV_FILE_VARIABLE
        and not (set(name.split("_")) & set(_SECRETS))
        and "\n" not in value
        and value == value.strip()
    }


def users_env_files(environment: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """What the user's own ``.deepspeed_env`` in ``folders`` (or the file named by DS_ENV_FILE) sets, the last one first
    in rank. Blank lines and comments are left out.

    Raises:
        ConfigError: a line is no ``KEY=VALUE``.
    """
    exports: dict[str, str] = {}
    problems = []
    name = environment.get(ENV_FILE_VARIABLE, USUAL_ENV_FILE)
    for path in dict.fromkeys(folder.expanduser() / name for folder in folders):
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
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
    """A ``.deepspeed_env`` from which the remote shell of pdsh gets exactly ``exports``.

    Raises:
        ConfigError: a value has several lines, or blanks at its ends, which DeepSpeed cuts off.
    """
    wrong = [name for name, value in exports.items() if value != value.strip() or "\n" in value]
    if wrong:
        raise ConfigError(
            f"launch: {', '.join(wrong)}: a value with blanks at its ends or of several lines does not reach other "
            "machines over pdsh. Set it in the script."
        )
    return "".join(f"{name}={escaped(value)}\n" for name, value in exports.items())


def escaped(value: str) -> str:
    """``value`` as it must stand in the file. DeepSpeed puts double quotes around what is not plain; pdsh replaces
    ``%h``, ``%u`` and ``%n``."""
    if re.fullmatch(_PLAIN, value) is None:
        value = re.sub(r'([\\"$`])', r"\\\1", value)
    return value.replace("%", "%%")
