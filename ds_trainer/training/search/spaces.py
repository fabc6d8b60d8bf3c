"""The default search spaces: learning rate, epochs, seed and micro-batch size.

Names and ranges are those of the functions of the same names in transformers 5.
"""

from __future__ import annotations

from typing import Any

_MICRO_BATCHES = (4, 8, 16, 32, 64)


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Suggest the values of an optuna trial."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", list(_MICRO_BATCHES)),
    }


def default_hp_space_ray(trial: Any = None) -> dict[str, Any]:
    """The search space of Ray Tune. Needs ray. Unlike in transformers, seeds are integers."""
    from ray import tune

    return {
        "learning_rate": tune.loguniform(1e-6, 1e-4),
        "num_train_epochs": tune.choice(list(range(1, 6))),
        "seed": tune.randint(1, 41),
        "per_device_train_batch_size": tune.choice(list(_MICRO_BATCHES)),
    }


def default_hp_space_wandb(trial: Any = None) -> dict[str, Any]:
    """The configuration of a W&B sweep."""
    return {
        "method": "random",
        "metric": {"name": "objective", "goal": "minimize"},
        "parameters": {
            "learning_rate": {"distribution": "log_uniform_values", "min": 1e-6, "max": 1e-4},
            "num_train_epochs": {"distribution": "int_uniform", "min": 1, "max": 6},
            "seed": {"distribution": "int_uniform", "min": 1, "max": 40},
            "per_device_train_batch_size": {"values": list(_MICRO_BATCHES)},
        },
    }
