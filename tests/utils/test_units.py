"""Numbers as a person reads them."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds_trainer
from ds_trainer.arguments.compat.dict_fields import mapping_of_text
from ds_trainer.launching.batch_script import parse_time_limit
from ds_trainer.recipes.devices import parse_devices
from ds_trainer.training.stopping.job_end import JobEnd
from ds_trainer.training.stopping.stop_controller import launcher_restarts
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import (
    counted,
    human_count,
    human_duration,
    human_operations,
    parse_size,
    parse_tokens,
    whole_number,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (1, "1"), (842, "842"), (0.5, "0.5"), (3.14159, "3.14"), (999.4, "999"), (999.6, "1k"),
        (1000, "1k"), (1010, "1.01k"), (12_345, "12.3k"), (99_949, "99.9k"), (99_951, "100k"), (999_999, "1M"),
        (25_300_000, "25.3M"), (7_000_000_000, "7B"), (1.01e12, "1.01T"), (5e15, "5000T"), (-12_345, "-12.3k"),
        (math.nan, "nan"), (math.inf, "inf")
    ]
)  # fmt: skip
def test_human_count(number: float, text: str) -> None:
    assert human_count(number) == text


@given(st.floats(1.0, 9e14))
def test_human_count_is_within_half_a_percent(number: float) -> None:
    text = human_count(number)
    factor = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMBT")) * factor == pytest.approx(number, rel=0.00501)
    assert len(text) <= 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"), (0.424, "0.42 s"), (9.996, "10.0 s"), (12.34, "12.3 s"), (59.94, "59.9 s"),
        (59.96, "1 min 00 s"), (200, "3 min 20 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"), (86_399, "1 d 00 h"), (4 * 86_400 + 7_300, "4 d 02 h"), (math.inf, "inf")
    ]
)  # fmt: skip
def test_human_duration(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 FLOP"), (842, "842 FLOP"), (1500, "1.5 kFLOP"), (6.3e9, "6.3 GFLOP"), (989.4e12, "989 TFLOP")],
)
def test_human_operations(number: float, text: str) -> None:
    assert human_operations(number) == text


def test_one_is_no_plural() -> None:
    assert [counted(number, "step") for number in (0, 1, 2, 1000)] == ["0 steps", "1 step", "2 steps", "1,000 steps"]
    assert [counted(number, "file was", "files were") for number in (1, 3)] == ["1 file was", "3 files were"]


PRINTED = (
    *("cli", "config", "data", "engine", "launching", "monitor", "optim", "parallel", "planner", "recipes", "samples"),
    "training/dry_run.py",
)
SQUARE, THOUSANDS, ARABIC = "\u00b2", "9" * 5000, "\u0663"  # isdigit() is true; int() and float() fail or take them


@pytest.mark.parametrize("text", [SQUARE, THOUSANDS, ARABIC, "--5"])
def test_numbers_in_text_are_few_ascii_digits(text: str) -> None:
    """Wherever a number is read from the environment, an option or a file."""
    assert whole_number(text) is None and whole_number("42") == 42
    for parse in (parse_size, parse_tokens, parse_time_limit):
        with pytest.raises(ValueError, match="is not a"):
            parse(f"{text}GB" if parse is parse_size else text)
    variables = {"TORCHELASTIC_RESTART_COUNT": text, "TORCHELASTIC_MAX_RESTARTS": "3", "SLURM_JOB_END_TIME": text}
    assert not launcher_restarts(variables)
    assert JobEnd({**variables, "SLURM_JOB_ID": "1", "PATH": ""}).at is None
    for moment in (text, "nan", "inf", "-5", "1e999"):
        with pytest.raises(ConfigError, match="seconds since 1970"):
            JobEnd({"DS_TRAINER_JOB_END": moment})
    with pytest.raises(ConfigError):
        parse_devices(f"{text} x H100-80GB")
    assert mapping_of_text(json.dumps({"x": text})) == {"x": text}


PLURAL = (
    "answers|batches|checkpoints|columns|conversations|devices|directories|documents|entries|epochs|errors|examples|"
    "failures|files|GPUs|images|keys|layers|lines|machines|micro-batches|models|nodes|operators|problems|processes|"
    "ranks|records|restarts|rows|rules|samples|sequences|steps|tensors|turns|values|warnings|workers"
)
CONSTANT = re.compile(r"_?[A-Z][A-Z_]+")  # a name of a number that is known not to be one


def plurals(source: str) -> Iterator[str]:
    """Counts before a plural, in f-strings and in formats of the log."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            for value, text in zip(node.values, node.values[1:], strict=False):
                if not (isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant)):
                    continue
                spec = ast.unparse(value.format_spec) if value.format_spec else ""
                whole = not spec or spec == "f','"  # not 1.0, as of means
                called = isinstance(value.value, ast.Call) and ast.unparse(value.value.func) in (
                    "counted",
                    "human_count",
                )
                if not whole or called or CONSTANT.fullmatch(ast.unparse(value.value)):
                    continue
                if re.match(rf" ({PLURAL})\b", str(text.value)):
                    yield f"{node.lineno}: {ast.unparse(value.value)}{text.value}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"{node.lineno}: {one[0]}" for one in re.finditer(rf"%d ({PLURAL})\b", node.value))


def test_no_message_says_1_samples() -> None:
    """What the commands, the recipes, the monitor and the launcher print counts through :func:`counted`."""
    assert list(plurals("f'{n} ranks'; f'{n:,} files'; '%d rows'; f'{counted(n, str())} steps'")) == [
        "1: n ranks", "1: n files", "1: %d rows"
    ]  # fmt: skip
    root = Path(ds_trainer.__file__).parent
    files = [
        path for name in PRINTED for path in ([root / name] if "." in name else sorted((root / name).rglob("*.py")))
    ]
    assert len(files) > 100
    assert [f"{path.relative_to(root)}:{found}" for path in files for found in plurals(path.read_text())] == []
