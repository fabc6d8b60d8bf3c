"""Scripts and libraries for transformers' Trainer, unchanged on ours: losses, gradient norms, rates and metrics.

Run with ``tools/test_clients.sh``, which installs the extra ``clients``. These are all clients on one rank and a
selection of layouts; ``tools/clients_table.py`` runs all of them in all layouts.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.clients.clients import CLIENTS, LAYOUTS
from tests.clients.runs import Found, by_command_line, too_different, with_ds_trainer, with_transformers

SELECTED = [
    *[(name, stage) for name in ("TRL SFT", "TRL DPO", "TRL GRPO") for stage in ("ZeRO 2", "ZeRO 3")],
    ("TRL SFT", "SP 2"),
    ("TRL SFT", "TP 2"),
    ("TRL SFT, packing", "ZeRO 3"),
    ("TRL KTO", "ZeRO 2"),
    ("causal language modeling", "ZeRO 2"),
    ("masked language modeling", "ZeRO 3"),
    ("token classification", "ZeRO 3"),
    ("question answering", "ZeRO 3"),
    ("summarization, label smoothing", "ZeRO 3"),
    ("prompt tuning", "ZeRO 3"),
]


@functools.cache
def reference(name: str, ranks: int, folder: str) -> Found:
    """What the client reports on transformers' Trainer."""
    found = with_transformers(CLIENTS[name], Path(folder) / f"{name}-{ranks}", ranks)
    assert found["trainer"] == "transformers"
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For output of the references."""
    return str(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("name", CLIENTS)
def test_one_rank_gives_the_numbers_and_files_of_transformers(name: str, folder: str, tmp_path: Path) -> None:
    wanted = reference(name, 1, folder)
    found = with_ds_trainer(CLIENTS[name], tmp_path)
    assert found["trainer"] == "ds_trainer"
    assert too_different(wanted, found, 1e-5) == []
    assert set(wanted.get("files", ())) - set(found.get("files", ())) <= {"training_args.bin"}


@pytest.mark.parametrize(("name", "layout"), SELECTED)
def test_a_layout_gives_the_numbers_of_transformers(name: str, layout: str, folder: str, tmp_path: Path) -> None:
    client, chosen = CLIENTS[name], LAYOUTS[layout]
    found = with_ds_trainer(client, tmp_path, chosen.ranks, settings=chosen.settings)
    wanted = reference(name, chosen.replicas if client.depends_on_ranks else 1, folder)
    assert too_different(wanted, found, 1e-4) == []


@pytest.mark.parametrize(
    "name", ["text classification", "sentence-transformers", "sentence-transformers, cross-encoder"]
)
def test_the_command_starts_the_ranks_of_an_unchanged_script(name: str, folder: str, tmp_path: Path) -> None:
    """In new processes; the other tests fork ranks from one that has imported the libraries."""
    client = CLIENTS[name]
    found = by_command_line(client, tmp_path, 2, ["zero_stage=3"])
    assert found["trainer"] == "ds_trainer"
    assert too_different(reference(name, 2 if client.depends_on_ranks else 1, folder), found, 1e-4) == []
