"""A release of a clone of this checkout: what it checks, what it makes, and that a failure leaves nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)


def run(*command: str, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the files of this one, whose origin is the one that pyproject.toml names."""
    folder = tmp_path / "clone"
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for name in names:
        top = name.split("/")[0]
        if name and (top in ("ds_trainer", "tools") or "/" not in name) and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    assert REPOSITORY is not None
    run("git", "init", "-q", cwd=folder)
    for key, value in (("user.name", "a"), ("user.email", "a@example.com"), ("commit.gpgsign", "false")):
        run("git", "config", key, value, cwd=folder)
    run("git", "remote", "add", "origin", REPOSITORY[1] + ".git", cwd=folder)
    run("git", "add", "--all", cwd=folder)
    run("git", "commit", "-qm", "all", cwd=folder)
    return folder


def release(clone: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/release.py", version, "--no-site"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=clone, env=variables, capture_output=True, text=True, check=False)


def test_a_release(clone: Path) -> None:
    done = release(clone, "7.8.9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run("git", "describe", cwd=clone).strip() == "v7.8.9"
    assert run("git", "status", "--porcelain", "--untracked-files=no", cwd=clone) == ""
    assert re.search(r"^## 7\.8\.9 \(\d{4}-\d\d-\d\d\)$", (clone / "CHANGELOG.md").read_text(), re.MULTILINE)
    (wheel,) = (clone / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = file.read("ds_trainer-7.8.9.dist-info/METADATA").decode()
    files = [p for p in run("git", "ls-files", "ds_trainer", cwd=clone).splitlines() if not p.endswith(".md")]
    assert set(files) - names == set()
    assert "Project-URL: Repository, " in metadata and "Requires-Python" in metadata
    description = metadata.partition("\n\n")[2]
    assert not re.findall(r"\]\((?!https://|#)", description), "a registry has no relative links"
    (source,) = (clone / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert "ds_trainer-7.8.9/pyproject.toml" in archive.getnames()
    again = release(clone, "7.8.9")
    assert again.returncode == 1 and "the tag v7.8.9 exists" in again.stderr and "(unreleased)" in again.stderr


def test_what_is_refused_leaves_no_trace(clone: Path) -> None:
    (clone / "README.md").write_text("changed")
    run("git", "remote", "set-url", "origin", "git@example.com:somebody/fork.git", cwd=clone)
    done = release(clone, "1.0")
    assert done.returncode == 1
    for part in ("not a version", "not committed", "https://example.com/somebody/fork"):
        assert part in done.stderr
    run("git", "checkout", "-q", ".", cwd=clone)
    run("git", "remote", "set-url", "origin", REPOSITORY[1], cwd=clone)  # type: ignore[index]
    (clone / "pyproject.toml").write_text((clone / "pyproject.toml").read_text().replace("[project]", "[project", 1))
    run("git", "commit", "-qam", "broken", cwd=clone)
    done = release(clone, "1.0.0")
    assert done.returncode == 1 and "failed" in done.stderr
    assert run("git", "status", "--porcelain", "--untracked-files=no", cwd=clone) == ""
    assert run("git", "tag", cwd=clone) == ""


def test_workflows_call_ci_and_build_the_tag() -> None:
    folder = ROOT / ".github" / "workflows"
    steps = {
        path.stem: [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
        for path in folder.glob("*.yml")
    }
    assert any(".ci/run" in step.get("run", "") for step in steps["ci"])
    assert any("build" in step.get("run", "") for step in steps["release"])
