#!/usr/bin/env python3
"""Which libraries and scripts for transformers' Trainer give the same numbers here, and in which layouts.

    python tools/clients_table.py                          run everything (half an hour on two cores), print the table
    python tools/clients_table.py --write                  also put it into docs/reference/clients.md
    python tools/clients_table.py --write "TRL SFT" LoRA   only rows whose names contain one of these, others unchanged

Each script runs on transformers' Trainer and then with `ds-trainer run` in each layout. A cell has the largest
difference between two numbers (losses, gradient norms, learning rates, metrics of evaluations and predictions),
relative to the larger of both or to 1, or the first words of the error with which the package refuses the combination.
Exits with 1 if a cell has neither. Needs the extra `clients`: `tools/test_clients.sh` installs it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.clients.clients import LAYOUTS, PEFT, SENTENCES, TRANSFORMERS, TRL, Client, Layout
from tests.clients.runs import Found, RunFailed, differences, with_ds_trainer, with_transformers

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "clients.md"
BEGIN, END = "<!-- made by tools/clients_table.py -->", "<!-- end -->"
LIBRARIES = {"transformers": TRANSFORMERS, "PEFT": PEFT, "TRL": TRL, "sentence-transformers, SetFit": SENTENCES}
TOLERANCE = {"1 rank": 1e-5}
TOLERANCE_OF_LAYOUTS = 1e-4
WORDS = 14


class Row:
    """One client in all layouts."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.references: dict[int, Found] = {}

    def reference(self, layout: Layout) -> Found:
        """The run on transformers' Trainer with which ``layout`` is compared."""
        ranks = layout.replicas if self.client.depends_on_ranks else 1
        if ranks not in self.references:
            self.references[ranks] = with_transformers(self.client, self.folder / f"reference-{ranks}", ranks)
        return self.references[ranks]

    def cell(self, name: str) -> tuple[str, bool]:
        """What the table says about the layout ``name``, and whether that is a result that it may have."""
        layout = LAYOUTS[name]
        wanted = self.reference(layout)
        try:
            found = with_ds_trainer(self.client, self.folder / name, layout.ranks, settings=layout.settings)
        except RunFailed as failure:
            print(failure, file=sys.stderr)
            if failure.refusal:
                return f"refused: {first_words(failure.refusal)}", True
            return "fails", False
        sizes = differences(wanted, found)
        sizes = {name: size for name, size in sizes.items() if not name.endswith(self.client.undefined)}
        place = max(sizes, key=lambda each: sizes[each])
        if sizes[place] > TOLERANCE.get(name, TOLERANCE_OF_LAYOUTS):
            return f"differs: {sizes[place]:.0e} in {place}", False
        return f"equal, {sizes[place]:.0e}" if sizes[place] else "equal", True


def first_words(text: str) -> str:
    """The beginning of an error, as a cell."""
    words = text.replace("|", "\\|").split()
    return " ".join(words[:WORDS]) + (" ..." if len(words) > WORDS else "")


def row_of(name: str, library: str, client: Client, folder: Path) -> tuple[str, list[str]]:
    """A line of the table, and what is wrong in it."""
    row, cells, problems = Row(client, folder), [], []
    for layout in LAYOUTS:
        text, good = row.cell(layout)
        print(f"{name}, {layout}: {text}", file=sys.stderr, flush=True)
        cells.append(text)
        if not good:
            problems.append(f"{name}, {layout}: {text}")
    return f"| {library} | {name} | {' | '.join(cells)} |", problems


def page() -> tuple[str, str, str]:
    """The page before, in and after the table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    return before, table, after


def table_of(written: dict[str, str]) -> str:
    """The table, with the lines that there are, in the order of the clients."""
    names = [name for clients in LIBRARIES.values() for name in clients if name in written]
    head = [f"| library | script | {' | '.join(LAYOUTS)} |", "|---" * (len(LAYOUTS) + 2) + "|"]
    return "\n".join([*head, *(written[name] for name in names)])


def main() -> int:
    """Print or write the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument("names", nargs="*", help="only rows whose name contains one of these")
    options = parser.parse_args()
    written = {line.split("|")[2].strip(): line for line in page()[1].splitlines() if "|" in line}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for library, clients in LIBRARIES.items():
            for name, client in clients.items():
                if options.names and not any(part in name for part in options.names):
                    continue
                written[name], found = row_of(name, library, client, Path(folder, name))
                problems += found
                if options.write:
                    before, _, after = page()
                    PAGE.write_text(f"{before}{BEGIN}\n\n{table_of(written)}\n\n{END}{after}", encoding="utf-8")
    print(table_of(written))
    for problem in problems:
        print(f"clients_table: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
