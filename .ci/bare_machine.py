#!/usr/bin/env python3
"""Runs a command as on a machine that has Python, git and a C compiler alone, as the README says of launch/test.sh.

    unshare --mount --propagation private python3 .ci/bare_machine.py launch/test.sh

For Debian and Ubuntu, as root. Programs, headers, Python packages and data of every package of the system that neither
these three need nor every installation has are covered in this mount namespace, and so is /usr/local. Shared libraries
stay: wheels and the Python that runs this may need them. What is covered is printed by its number; where a machine does
not allow it, the command runs with all that there is, and that is said.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SEEN = ("git", "gcc", "libc6-dev", "python3", "python3-venv", "apt", "ca-certificates")
STATUS = Path("/var/lib/dpkg/status")
FILES = Path("/var/lib/dpkg/info")
SHARED_LIBRARY = re.compile(r"\.so\.\d")
UPPER = Path("/run/ds_trainer_bare_machine")


def packages() -> tuple[set[str], set[str]]:
    """All packages that are installed, and those of them that ``SEEN`` and every installation need."""
    installed: dict[str, dict[str, str]] = {}
    providers: dict[str, list[str]] = {}
    for block in STATUS.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", block, re.MULTILINE))
        if not fields.get("Status", "").endswith(" installed"):
            continue
        installed[fields["Package"]] = fields
        for name in [fields["Package"], *_names(fields.get("Provides", ""))]:
            providers.setdefault(name, []).append(fields["Package"])
    needed: set[str] = set()
    todo = [name for name, fields in installed.items() if fields.get("Priority") == "required"]
    todo += [name for name, fields in installed.items() if fields.get("Essential") == "yes"]
    todo += SEEN
    while todo:
        for name in providers.get(todo.pop(), ()):
            if name not in needed:
                needed.add(name)
                todo += _names(installed[name].get("Depends", "") + "," + installed[name].get("Pre-Depends", ""))
    return set(installed), needed


def _names(relations: str) -> list[str]:
    """Names in a field of relations: of ``a (>= 1) | b:any, c`` these are a, b and c."""
    return [re.split(r"[\s(:]", name.strip())[0] for name in re.split(r"[,|]", relations) if name.strip()]


def files(names: set[str]) -> Iterator[str]:
    """Files of these packages below /usr, relative to it. /bin, /sbin and /lib lead there."""
    for path in FILES.glob("*.list"):
        if path.stem.partition(":")[0] in names:
            for line in path.read_text(encoding="utf-8").splitlines():
                inside = re.sub(r"^/(?=(bin|sbin|lib\w*)/)", "/usr/", line)
                if inside.startswith("/usr/"):
                    yield inside.removeprefix("/usr/")


def alternatives(hidden: set[str]) -> Iterator[str]:
    """Links of /usr/bin and /usr/include that end at what is hidden: /etc/alternatives has them in no package."""
    for folder in ("bin", "sbin", "include"):
        for path in Path("/usr", folder).iterdir():
            if path.is_symlink() and path.resolve().as_posix().removeprefix("/usr/") in hidden:
                yield f"{folder}/{path.name}"


def cover() -> int:
    """Covers what a bare machine has not, by an overlay over /usr; how many files that are."""
    installed, needed = packages()
    kept = set(files(needed))
    hidden = {name for name in files(installed - needed) if name not in kept and not SHARED_LIBRARY.search(name)}
    hidden |= set(alternatives(hidden))
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", UPPER], check=True)
    upper, work = UPPER / "upper", UPPER / "work"
    upper.mkdir()
    work.mkdir()
    number = 0
    for name in sorted(hidden):
        original = Path("/usr", name)
        if original.is_symlink() or original.is_file():
            parent = (upper / name).parent
            parent.mkdir(parents=True, exist_ok=True)
            os.mknod(upper / name, stat.S_IFCHR, os.makedev(0, 0))  # of overlays: there is no such file
            number += 1
    # Packages of Python that no package of the system brought, and what the administrator of this machine installed.
    whole = [path.relative_to("/usr") for path in Path("/usr/lib/python3/dist-packages").glob("*")]
    whole = [path for path in whole if not any(name.startswith(f"{path}/") or name == str(path) for name in kept)]
    for path in [*whole, *([] if Path(sys.base_prefix).is_relative_to("/usr/local") else [Path("local")])]:
        shutil.rmtree(upper / path, ignore_errors=True)
        (upper / path).unlink(missing_ok=True)
        (upper / path).parent.mkdir(parents=True, exist_ok=True)
        os.mknod(upper / path, stat.S_IFCHR, os.makedev(0, 0))
    options = f"lowerdir=/usr,upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, "/usr"], check=True)
    return number


def main() -> None:
    """Cover, then become the command."""
    try:
        UPPER.mkdir(exist_ok=True)
        print(f"[ci] a bare machine: {cover()} files of the system are covered", flush=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"[ci] NOT a bare machine: {error}; the tests see all that is installed", flush=True)
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME"):
        os.environ.pop(name, None)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
