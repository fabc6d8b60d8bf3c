"""W&B sweeps. A sweep needs W&B's server; its place is taken by the smallest stand-in of ``wandb.sweep`` and
``wandb.agent``: it draws from the sweep's ``values`` and calls the function in a run of wandb's own, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_trainer import ConfigError
from tests.training.search.test_search_ranks import arguments, make_trainer

wandb = pytest.importorskip("wandb")


class Server:
    """Keeps the sweep's configuration and hands out its grid."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sweeps: dict[str, Any] = {}
        self.failed: list[str] = []

    def sweep(self, config: dict[str, Any], project: str | None = None, entity: str | None = None) -> str:
        self.sweeps["s1"] = (config, project)
        return "s1"

    def agent(self, sweep_id: str, function: Any, count: int | None = None, **where: Any) -> None:
        config, _ = self.sweeps[sweep_id]
        grid = config["parameters"]["learning_rate"]["values"]
        for rate in grid[:count]:
            run = wandb.init(
                mode="offline", dir=str(self.directory), config={"learning_rate": rate}, reinit="finish_previous"
            )
            run._settings.sweep_id = sweep_id
            try:
                function()
            except Exception as error:
                self.failed.append(str(error))
            wandb.finish()


def space(trial: Any) -> dict[str, Any]:
    return {"method": "grid", "parameters": {"learning_rate": {"values": [0.02, -1.0, 0.1]}}}


@pytest.mark.extended
def test_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path)
    monkeypatch.setattr(wandb, "sweep", server.sweep)
    monkeypatch.setattr(wandb, "agent", server.agent)
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = make_trainer(arguments(str(tmp_path), max_steps=2))
    before = trainer.callback_handler.callback_list
    best = trainer.hyperparameter_search(space, n_trials=3, backend="wandb", project="p", name="n")
    config, project = server.sweeps["s1"]
    assert config["metric"] == {"name": "eval/loss", "goal": "minimize"} and (config["name"], project) == ("n", "p")
    assert best.hyperparameters == {"learning_rate": 0.1} and best.run_summary == "s1"  # type: ignore[union-attr]
    assert len(server.failed) == 1 and "learning_rate=-1" in server.failed[0]
    assert len(list(tmp_path.glob("run-*"))) == 2
    assert (tmp_path / f"run-{best.run_id}" / "trainer_state.json").is_file()  # type: ignore[union-attr]
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 3  # the sweep's runs were used, no others were opened
    assert trainer.callback_handler.callback_list == before


def test_unknown_keywords_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sweepid='x' is not an argument of this backend. Did you mean 'sweep_id'"):
        make_trainer(arguments(str(tmp_path))).hyperparameter_search(space, backend="wandb", sweepid="x")
