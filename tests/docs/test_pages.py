"""Pages and community files agree with the code: names, paths, numbers, messages, links, the navigation."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import ds_trainer
from ds_trainer import Seq2SeqTrainingArguments
from tests.support.transformers_version import needs_the_reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NEW = (
    "how-to/install",
    "how-to/migrate",
    "how-to/choose-zero-stage",
    "how-to/troubleshooting",
    "tutorials/script-to-cluster",
)
FIELDS = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# -- generated pages ---------------------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "tool", ["recipe_reference", "zero_table", "behaviors_table", "plan_page", "recipe_plans", "loss_table"]
)
def test_generated_pages_are_current(tool: str) -> None:
    """When this fails: python tools/TOOL.py --write"""
    code = (
        f"import sys; sys.path.insert(0, 'tools'); import {tool} as tool; text = tool.PAGE.read_text(encoding='utf-8');"
    )
    reads = tool in ("zero_table", "plan_page", "recipe_plans")
    code += f" print(tool.page({'text' if reads else ''}) == text)"
    completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.stdout.split()[-1:] == ["True"], completed.stderr


def test_the_zero_table_counts_known_models() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import zero_table

    billions = [round(model.parameters / 1e9, 2) for model in zero_table.MODELS]
    assert billions == [1.24, 3.21, 8.03, 14.77, 32.76, 70.55, 405.85]  # as their model cards say
    eight = zero_table.MODELS[2].parameters
    assert zero_table.states(eight, 0, 8) == (16 * eight, 0)
    assert zero_table.states(eight, 1, 8) == (4 * eight + 12 * eight / 8, 0)
    assert zero_table.states(eight, 2, 8, offload=True) == (2 * eight + 2 * eight / 8, 12 * eight / 8)
    assert zero_table.states(eight, 3, 8) == (2 * eight, 0)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", NEW)
def test_arguments_that_pages_name_exist(page: str) -> None:
    """``name=value`` in code and ``--name`` of our own commands."""
    outside = {"fsdp", "deepspeed", "device_map", "model", "args", "train_dataset", "world", "resume_from_checkpoint"}
    outside |= {"optimizers", "split_batches", "use_orig_params", "num_machines", "num_processes"}  # of other libraries
    content = text(f"docs/{page}.md")
    named = set(re.findall(r"`(\w+)=[^`]*`", content)) | set(re.findall(r"--(\w+_\w+)", content))
    launchers = {"num_gpus", "no_local_rank", "local_rank"}
    environment = {name for name in named if name.isupper()}
    assert named - FIELDS - outside - launchers - environment == set()


@needs_the_reference
def test_every_argument_of_transformers_is_here_with_its_default() -> None:
    """What the migration page says."""
    from transformers import TrainingArguments

    ours = {field.name: field for field in dataclasses.fields(ds_trainer.TrainingArguments)}
    for field in dataclasses.fields(TrainingArguments):
        for kind in ("default", "default_factory"):
            value, own = getattr(field, kind), getattr(ours[field.name], kind)
            assert callable(value) or value is dataclasses.MISSING or str(value) == str(own), field.name


def messages() -> str:
    """Every text of the package, values as ``…``, one a line."""
    found = []
    for path in (ROOT / "ds_trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(line.replace("\n", " ") for line in found)


OTHERS = (
    "--local_rank",
    "torch.Out",
    "Killed",
    "Bus error",
    "No space",
    "OSError",
    "Watchdog caught",
    "No module",
    "Error building",
)


def test_messages_that_the_page_explains_are_messages() -> None:
    known = messages()
    rows = re.findall(r"^\| `([^`]+)`", text("docs/how-to/troubleshooting.md"), flags=re.MULTILINE)
    unknown = []
    for quoted in rows:
        if quoted == "save_model" or any(other in quoted for other in OTHERS):
            continue
        pattern = ".*".join(re.escape(part) for part in quoted.split("…"))
        if not re.search(pattern, known):
            unknown.append(quoted)
    assert len(rows) > 20
    assert unknown == []


# -- paths and links ---------------------------------------------------------------------------------------------------


PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "ds_configs/*.md")
    for path in ROOT.glob(pattern)
)
OF_OTHERS = ("docs/upstream/", "docs/reference/deepspeed-files.md", "docs/reference/formats.md")
"""Pages about repositories of others, with the paths of those."""
FOLDERS = ("ds_trainer", "tests", "tools", "docs", "examples", "launch", "benchmarks", "ds_configs")
BASES = ("", "ds_trainer", "ds_trainer/training", "tests", "benchmarks")
"""What a path on a page may be relative to."""


def quoted_paths(page: str) -> set[str]:
    """Backticked paths of a page: files of code, and folders of this repository."""
    prose = re.sub(r"```.*?```", "", text(page), flags=re.DOTALL)
    file, folder = r"[\w.-]+(?:/[\w.*-]+)*\.(?:py|sh|sbatch)", rf"(?:{'|'.join(FOLDERS)})(?:/[\w.*-]+)+"
    return set(re.findall(rf"`({file}|{folder})(?=[`:( /])", prose))


@functools.cache
def files_of(package: str) -> frozenset[str]:
    """Names of the Python files of this repository, or of an installed package."""
    spec = importlib.util.find_spec(package) if package else None
    folders = [ROOT / name for name in FOLDERS] if spec is None else [Path(str(spec.origin)).parent]
    return frozenset(path.name for folder in folders for path in folder.rglob("*.py"))


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(OF_OTHERS)])
def test_paths_exist(page: str) -> None:
    """Files and folders that a page names are there. A file without a folder: one of this name is."""
    known = files_of("") | files_of("deepspeed")
    missing = []
    for path in sorted(quoted_paths(page) - {"benchmarks/wheels"}):  # git ignores it
        if "/" not in path and path.endswith(".py"):
            found = path in known
        else:
            bases = [(ROOT / page).parent, *(ROOT / base for base in BASES)]
            found = any(any(base.glob(name)) for base in bases for name in (path, f"{path}.py"))
        if not found:
            missing.append(path)
    assert missing == []


def test_the_page_of_concepts_names_many_files() -> None:
    assert len(quoted_paths("docs/explanation/where-is-what.md")) > 90


def test_relative_links_lead_somewhere() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "ds_configs").glob("*.md"),
    ]
    broken = []
    repository = re.search(r'^Repository = "(.*)"$', text("pyproject.toml"), flags=re.MULTILINE)
    assert repository is not None
    own = re.compile(
        re.escape(repository[1]).replace("github", r"(?:github|raw\.githubusercontent)") + "/(?:blob/)?main/"
    )
    for page in pages:
        content = page.read_text(encoding="utf-8")
        targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", content)
        for target in targets + re.findall(r"^\[[^\]]+\]: ([^#\s]+)", content, flags=re.MULTILINE):
            inside = own.sub("", target)  # absolute, for a registry; a file of this repository all the same
            if inside != target and not (ROOT / inside).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_the_navigation_is_complete() -> None:
    def pages(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        values = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return [page for value in values for page in pages(value)]

    listed = pages(yaml.safe_load(text("mkdocs.yml"))["nav"])
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    folders = {page.split("/")[0] for page in listed if "/" in page}
    assert folders == {"tutorials", "how-to", "reference", "explanation", "upstream"}


def test_every_public_name_has_an_api_entry() -> None:
    api = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference" / "api").glob("*.md"))
    entries = set(re.findall(r"^::: ds_trainer\.(\w+)", api, flags=re.MULTILINE))
    collators = {name for name in ds_trainer.__all__ if name.startswith("DataCollator")}
    assert entries == set(ds_trainer.__all__) - {"__version__"} - collators
    assert all(f"`{name}`" in api for name in collators)


# -- a public project --------------------------------------------------------------------------------------------------


def test_there_is_one_version() -> None:
    assert 'dynamic = ["version"]' in text("pyproject.toml")
    assert 'version = { attr = "ds_trainer.__version__" }' in text("pyproject.toml")
    newest = re.search(r"^## (\S+)", text("CHANGELOG.md"), flags=re.MULTILINE)
    assert newest is not None and newest[1] == ds_trainer.__version__
    written = [name for name in ("CITATION.cff", "mkdocs.yml", "setup.cfg") if ds_trainer.__version__ in text(name)]
    assert written == []


def test_the_license_is_whole_and_named_once() -> None:
    assert text("LICENSE").split()[:3] == ["Apache", "License", "Version"]
    assert "END OF TERMS AND CONDITIONS" in text("LICENSE")
    assert 'license = "Apache-2.0"' in text("pyproject.toml")
    assert yaml.safe_load(text("CITATION.cff"))["license"] == "Apache-2.0"


def test_the_package_has_type_information() -> None:
    assert (ROOT / "ds_trainer" / "py.typed").is_file()
    assert '"py.typed"' in text("pyproject.toml")


def test_issue_templates_are_valid_forms() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.stem != "config":
            assert {"name", "description", "body"} <= set(form)
            ids = [part["id"] for part in form["body"]]
            assert len(ids) == len(set(ids))


def test_tests_of_reports_exist() -> None:
    """Each with the part of a name that selects it."""
    named = re.findall(r"`(tests/[\w/.]+)(?: -k (\w+))?`", text("docs/reference/reports-tried.md"))
    assert len(named) > 100
    assert [name for name, _ in named if not (ROOT / name).exists()] == []
    assert [pair for pair in named if pair[1] and pair[1] not in text(pair[0])] == []
