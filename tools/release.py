#!/usr/bin/env python3
"""Makes a release: version, changelog, wheel and source distribution, site, commit and tag. Pushes nothing.

    python tools/release.py 0.2.0             in a clean checkout, on the commit that CI has passed
    python tools/release.py 0.2.0 --no-site

The top section of CHANGELOG.md has to be ``(unreleased)``, and the addresses of pyproject.toml those of this checkout's
remote ``origin``. Both packages are built (``dist/``) and the wheel is tried outside of the checkout before anything is
committed; where a step fails, the checkout is as before. Then: ``git push origin HEAD vVERSION``; the workflow
``release`` uploads what it builds from the tag.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ds_trainer" / "__init__.py"
CHANGELOG = ROOT / "CHANGELOG.md"
VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
HEADING = re.compile(r"^## \S+ \(unreleased\)$", re.MULTILINE)


def output(*command: str, cwd: Path = ROOT) -> str:
    """What a command prints.

    Raises:
        SystemExit: it fails.
    """
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"release: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def problems(version: str) -> list[str]:
    """Why this checkout cannot be released as ``version``."""
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        found.append(f"{version!r} is not a version such as 0.2.0 or 0.2.0rc1")
    if output("git", "status", "--porcelain"):
        found.append("there are changes that are not committed")
    if output("git", "tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} exists")
    headings = re.findall(r"^## .*$", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    if not headings or not HEADING.fullmatch(headings[0]):
        found.append(f"CHANGELOG.md does not begin with a section '(unreleased)': {headings[:1]}")
    address = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    origin = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True).stdout
    remote = re.sub(r"^git@([^:]+):", r"https://\1/", origin.strip()).removesuffix(".git")
    if address is None or address[1] != remote:
        found.append(
            f"pyproject.toml says that the repository is {address and address[1]}, origin is {remote or 'not set'}: "
            "correct [project.urls] and the links of README.md"
        )
    return found


def build() -> Path:
    """Build both packages into ``dist/``; the wheel."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:  # what another build left in build/ would get into the wheel
        source = Path(folder) / "source"
        output("git", "worktree", "add", "--detach", str(source), "HEAD")
        try:
            for path in (PACKAGE, CHANGELOG):
                shutil.copy(path, source / path.relative_to(ROOT))
            for kind in ("sdist", "wheel"):
                code = f"from setuptools import build_meta; build_meta.build_{kind}({str(ROOT / 'dist')!r})"
                output(sys.executable, "-c", code, cwd=source)
        finally:
            output("git", "worktree", "remove", "--force", str(source))
    (wheel,) = (ROOT / "dist").glob("*.whl")
    return wheel


def try_wheel(wheel: Path, version: str) -> None:
    """Use the wheel outside of the checkout; its dependencies are those of this environment.

    Raises:
        SystemExit: it does not work, or is another version.
    """
    with tempfile.TemporaryDirectory() as folder:
        output(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{folder}/site", str(wheel))
        code = (
            "import sys; sys.path.insert(0, 'site'); import ds_trainer; from ds_trainer import TrainingArguments\n"
            "print(ds_trainer.__version__, 'site' in ds_trainer.__file__)"
        )
        found = output(sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-c", code, cwd=Path(folder))
        if found.splitlines()[-1:] != [f"{version} True"]:
            raise SystemExit(f"release: the wheel gives {found!r}, not version {version}")


def main() -> None:
    """Make the release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--no-site", action="store_true", help="do not build the site")
    options = parser.parse_args()
    found = problems(options.version)
    if found:
        raise SystemExit("release: " + "\nrelease: ".join(found))
    os.environ.pop("PYTHONPATH", None)
    before = {path: path.read_text(encoding="utf-8") for path in (PACKAGE, CHANGELOG)}
    try:
        heading = f"## {options.version} ({datetime.date.today().isoformat()})"
        PACKAGE.write_text(VERSION.sub(f'__version__ = "{options.version}"', before[PACKAGE]), encoding="utf-8")
        CHANGELOG.write_text(HEADING.sub(heading, before[CHANGELOG], count=1), encoding="utf-8")
        wheel = build()
        try_wheel(wheel, options.version)
        if not options.no_site:
            output("tools/build_docs.sh")
    except BaseException:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")
        raise
    output("git", "commit", "--all", "--message", f"Version {options.version}")
    output("git", "tag", "--annotate", f"v{options.version}", "--message", f"ds_trainer {options.version}")
    print(f"{wheel.name} is tried, v{options.version} is tagged. Publish: git push origin HEAD v{options.version}")


if __name__ == "__main__":
    main()
