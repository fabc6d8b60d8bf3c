"""Ray Tune for real, where it is installed: every trial is a process of Ray's with a copy of the trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import ConfigError
from tests.training.search.test_search_ranks import arguments, make_trainer

ray = pytest.importorskip("ray")
tune = pytest.importorskip("ray.tune")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token would be left behind in the home directory
    root = str(Path(__file__).parents[3])
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": tune.grid_search([0.02, 0.1]), "per_device_train_batch_size": 2}


@pytest.mark.slow
def test_a_search_with_ray(cluster: None, tmp_path: Path) -> None:
    trainer = make_trainer(arguments(str(tmp_path), max_steps=3))
    best = trainer.hyperparameter_search(
        space, n_trials=1, backend="ray", storage_path=str(tmp_path / "ray"), verbose=0
    )
    runs = {}
    for rate in (0.02, 0.1):
        alone = make_trainer(
            arguments(str(tmp_path / "alone"), max_steps=3, learning_rate=rate, per_device_train_batch_size=2)
        )
        alone.train()
        runs[rate] = next(entry["eval_loss"] for entry in alone.state.log_history[::-1] if "eval_loss" in entry)
        alone.engine.close()
    winner = min(runs, key=lambda rate: runs[rate])
    assert best.hyperparameters == {"learning_rate": winner, "per_device_train_batch_size": 2}  # type: ignore[union-attr]
    assert best.objective == pytest.approx(runs[winner], rel=1e-6)  # type: ignore[union-attr]
    assert len(best.run_summary.trials) == 2  # type: ignore[union-attr]
    assert (tmp_path / f"run-{best.run_id}" / "trainer_state.json").is_file()  # type: ignore[union-attr]
    assert trainer.args.learning_rate != winner
    trainer.train()  # it is whole again
    trainer.engine.close()


def test_what_ray_cannot_do_is_rejected(tmp_path: Path) -> None:
    from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

    trainer = make_trainer(arguments(str(tmp_path), eval_strategy="no"))
    mutations = {"learning_rate": [0.1]}
    for options, message in (
        ({"scheduler": PopulationBasedTraining(hyperparam_mutations=mutations)}, "moves weights between them"),
        ({"scheduler": ASHAScheduler()}, "decides at evaluations, but eval_strategy=no"),
        ({"direction": ["minimize", "minimize"]}, "only optuna supports several"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer.hyperparameter_search(space, n_trials=1, backend="ray", **options)
