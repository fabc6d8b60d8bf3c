"""Adds the digests of the installed packages to ds_trainer/engine/library_functions.json, after the tests have passed.

    python tools/library_functions.py           add; says which functions are new, changed or missing
    python tools/library_functions.py --check   only say it; exit code 1 if there is one

Run it in every environment of tools/versions.sh.
"""

from __future__ import annotations

import json
import sys

from ds_trainer.engine.library_functions import (
    DIGESTS,
    changed_functions,
    functions,
    installed_version,
    known_digests,
    package_of,
    source_digest,
)


def main(arguments: list[str]) -> int:
    """Say what differs; add it unless asked not to."""
    changes = changed_functions()
    for change in changes:
        print(change)
    if "--check" in arguments:
        return int(bool(changes))
    known, table = known_digests() if DIGESTS.is_file() else {}, functions()
    for name in table:
        version = installed_version(package_of(name))
        if version is not None:
            versions = known.setdefault(name, {}).setdefault(source_digest(name), [])
            versions[:] = sorted({*versions, version}, key=lambda text: [int(part) for part in text.split(".")])
    kept = {name: known[name] for name in sorted(table)}
    DIGESTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
