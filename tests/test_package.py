"""The package as a whole: what importing costs, the layers, the pins, and the check of CI."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import ds_trainer

ROOT = Path(__file__).resolve().parent.parent
# The folders of docs/architecture.md, lowest first.
LAYERS = [
    *("utils", "arguments", "parallel", "planner", "config", "engine", "data"),
    *("optim", "checkpoint", "monitor", "callbacks", "accelerator", "training", "samples", "recipes"),
    *("compatibility", "launching", "cli"),
]
HEAVY = ("torch", "deepspeed", "transformers")


def python(code: str) -> str:
    """What a fresh interpreter prints for this code."""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def repository_files() -> list[Path]:
    """Every file that is committed or would be, as git sees it."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_import_is_quick() -> None:
    code = "import time; began = time.perf_counter(); import ds_trainer; print(time.perf_counter() - began)"
    assert min(float(python(code)) for _ in range(5)) < 0.2


@pytest.mark.parametrize(
    "module",
    ["ds_trainer", "ds_trainer.arguments.training_arguments", "ds_trainer.recipes.recipe", "ds_trainer.cli.main"],
)
def test_import_is_light(module: str) -> None:
    loaded = python(f"import sys, {module}; print(*sys.modules)").split()
    assert module in loaded
    assert not set(HEAVY) & set(loaded)


def test_public_names_exist() -> None:
    for name in ds_trainer.__all__:
        assert getattr(ds_trainer, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ds_trainer.no_such_name


def test_type_checkers_see_the_same_public_names() -> None:
    tree = ast.parse((ROOT / "ds_trainer" / "__init__.py").read_text(encoding="utf-8"))
    blocks = (node for node in tree.body if isinstance(node, ast.If))
    (block,) = (node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    names = [alias for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in names)
    assert {alias.name for alias in names} == set(ds_trainer.__all__) - {"__version__"}


def test_a_strict_type_checker_accepts_imports_of_public_names(tmp_path: Path) -> None:
    """As in a user's project with mypy --strict, which takes only names that are exported explicitly."""
    package = tmp_path / "ds_trainer"
    package.mkdir()
    for name in ("__init__.py", "py.typed"):
        (package / name).write_bytes((ROOT / "ds_trainer" / name).read_bytes())
    names = sorted(ds_trainer.__all__)
    lines = [f"from ds_trainer import {name}" for name in [*names, "import_module"]]  # the last one is not public
    (tmp_path / "script.py").write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=skip"]
    options = ["--ignore-missing-imports", f"--cache-dir={tmp_path}", "script.py", "ds_trainer/__init__.py"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if line.startswith("script.py")]
    assert [error.split('"')[3] for error in errors] == ["import_module"], done.stdout + done.stderr


def test_folders_are_the_layers() -> None:
    folders = {path.parent.name for path in (ROOT / "ds_trainer").glob("*/*.py")}
    assert folders <= set(LAYERS)
    assert {"utils", "arguments", "engine", "training", "cli"} <= folders


def test_import_contracts_name_the_layers_in_order() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    layers = config["importlinter:contract:layers"]["layers"].replace("|", " ").split()
    assert layers == LAYERS[::-1]


def test_no_source_file_is_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in repository_files()
        if path.suffix in (".py", ".sh")
    }
    assert "ds_trainer/__init__.py" in lengths
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_file_names_this_machine() -> None:
    places = "|".join(("work", "root", "home", "Users", "opt"))
    pattern = re.compile(rf"(?<![\w.$}}~*-])/(?:{places})/[\w.]")
    assert pattern.search('"/' + 'work/main"')
    found = []
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_recipes_are_next_to_the_package() -> None:
    """An editable install finds them from the package's own place."""
    assert (Path(ds_trainer.__file__).parent.parent / "ds_configs" / "recipes" / "quickstart.yaml").is_file()


# -- pins --------------------------------------------------------------------------------------------------------------


def pins() -> dict[str, Requirement]:
    """Every pin that holds for this Python, by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    valid = [pin for pin in wanted if pin.marker is None or pin.marker.evaluate()]
    assert all(str(pin.specifier).startswith("==") for pin in valid)
    names = [canonicalize_name(pin.name) for pin in valid]
    assert len(names) == len(set(names))
    return dict(zip(names, valid, strict=True))


def test_installed_versions_are_the_pins() -> None:
    checked, wrong = set(), []
    for name, pin in pins().items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        checked.add(name)
        # A local part names a build of the same version: 2.13.0+cpu is 2.13.0.
        if not pin.specifier.contains(Version(installed).public):
            wrong.append(f"{name} {installed}, pinned {pin.specifier}")
    assert wrong == []
    assert {"torch", "deepspeed", "transformers", "accelerate", "pytest", "ruff"} <= checked


def test_everything_needed_is_pinned() -> None:
    """Follows the requirements of ds-trainer[dev] through what is installed."""
    todo, seen = [("ds-trainer", "dev"), ("ds-trainer", "")], set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(needed.name), extra) for extra in ("", *needed.extras)]
    names = {name for name, _ in seen} - {"ds-trainer"}
    # torch itself pins the exact CUDA packages of its build.
    names = {name for name in names if not name.startswith(("nvidia-", "cuda-")) and name != "triton"}
    assert names - set(pins()) == set()
    assert {"torch", "ruff", "sympy"} <= names


# -- the loss check of CI ----------------------------------------------------------------------------------------------

CHECK = ROOT / ".ci" / "check_loss_falls.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_loss_falls", CHECK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metrics(path: Path, losses: list[float]) -> Path:
    """A metrics file with these training losses and a line of evaluation after each."""
    lines = [
        json.dumps(record)
        for step, loss in enumerate(losses, start=1)
        for record in ({"step": step, "loss": loss}, {"step": step, "eval_loss": 100.0})
    ]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("losses", "code", "message"),
    [
        ([5.0 - 0.2 * i for i in range(10)], 0, "fell by 22%: mean of the first 5 losses 4.6000, of the last 5 3.6"),
        ([5.0] * 20, 1, "did not fall by 10%"),
        ([5.0] * 5 + [4.6] * 5, 1, "did not fall by 10%"),
        ([2.0 + 0.2 * i for i in range(10)], 1, "did not fall by 10%"),
        ([5.0 - 0.3 * i for i in range(9)], 1, "9 training losses are too few"),
        ([], 1, "0 training losses are too few"),
        ([5.0] * 10 + [float("nan")], 1, "loss at step 11 is nan"),
    ],
)
def test_loss_check(check: ModuleType, tmp_path: Path, capsys, losses: list[float], code: int, message: str) -> None:
    assert check.main([str(metrics(tmp_path / "metrics.jsonl", losses))]) == code
    assert message in "".join(capsys.readouterr())


def test_loss_check_refuses_what_it_cannot_read(check: ModuleType, tmp_path: Path, capsys) -> None:
    assert check.main([str(tmp_path / "absent.jsonl")]) == 1
    assert "absent.jsonl" in capsys.readouterr().err
    path = metrics(tmp_path / "cut.jsonl", [5.0 - 0.2 * i for i in range(10)])
    path.write_text(path.read_text(encoding="utf-8") + '{"step": 11, "lo', encoding="utf-8")
    assert check.main([str(path)]) == 1
    assert "cut.jsonl:21 is no JSON" in capsys.readouterr().err


def test_loss_check_as_a_command(tmp_path: Path) -> None:
    for losses, code in (([5.0] * 10, 1), ([5.0] * 5 + [1.0] * 5, 0)):
        command = [sys.executable, str(CHECK), str(metrics(tmp_path / "metrics.jsonl", losses))]
        assert subprocess.run(command, capture_output=True, check=False).returncode == code
