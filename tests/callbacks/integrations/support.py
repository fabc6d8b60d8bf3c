"""A short real training with a real tracker: on a rank of the pool, what is asserted about comes back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer import Trainer, TrainingArguments
from tests.callbacks.conftest import LogRecords
from tests.support.models import RaggedTokens, Regression, regression_rows, tiny_llama

TOKEN = "hf_MostSecretOfAllTokens"


@dataclass
class TrainingResult:
    """What came of it."""

    history: list[dict[str, Any]]
    warnings: list[str]
    steps: int
    extra: Any = None
    imported: list[str] = field(default_factory=list)

    def values(self, name: str) -> list[tuple[int, float]]:
        """Step and value of every log event that has ``name``."""
        return [(entry["step"], entry[name]) for entry in self.history if name in entry]

    def names(self) -> set[str]:
        """All names that were logged."""
        return {name for entry in self.history for name in entry} - {"step"}


def train(
    output_dir: Path,
    environment: dict[str, str],
    arguments: dict[str, Any],
    llama: bool = False,
    callbacks: tuple[Callable[[], Any], ...] = (),
    after: Callable[[Trainer], Any] | None = None,
) -> TrainingResult:
    """Three steps with a log event each, an evaluation at the end, and one more after the training."""
    import sys

    values: dict[str, Any] = dict(
        max_steps=3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        learning_rate=1e-2,
        disable_tqdm=True,
        use_cpu=True,
    )
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    trainer = None
    handler, logger = LogRecords(), logging.getLogger("ds_trainer")
    logger.addHandler(handler)
    try:
        args = TrainingArguments(str(output_dir), **{**values, **arguments})
        data: Any = RaggedTokens(24) if llama else regression_rows(24)
        model = tiny_llama() if llama else Regression()
        made = [make() for make in callbacks]
        held_out: Any = RaggedTokens(24, seed=1) if llama else data
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=held_out, callbacks=made)
        trainer.args.hub_token = TOKEN
        trainer.train()
        trainer.evaluate(metric_key_prefix="test")
        extra = after(trainer) if after else None
    finally:
        if trainer is not None and trainer._ds_trainer.engines.training_or_none is not None:
            trainer.engine.close()
        logger.removeHandler(handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return TrainingResult(
        trainer.state.log_history,
        [message for message in handler.messages if not message.startswith("INFO")],
        trainer.state.global_step,
        extra,
        [name for name in ("tensorboard", "wandb", "mlflow", "trackio") if name in sys.modules],
    )


def refusal(*arguments: Any, **keywords: Any) -> str:
    """The error that :func:`train` ends with."""
    try:
        train(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@dataclass(frozen=True)
class TransformersCallback:
    """Makes transformers' own callback of this class name: what names and values are compared with."""

    name: str

    def __call__(self) -> Any:
        from transformers.integrations import integration_utils

        return getattr(integration_utils, self.name)()


def files_with(text: str, directory: Path) -> list[Path]:
    """The files below ``directory`` in which ``text`` stands."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    assert found
    return [path for path in found if text.encode() in path.read_bytes()]


def files_below(directory: Path) -> list[str]:
    """Names of all files in a checkpoint, which must be whole: all that its manifest lists are there."""
    from ds_trainer.checkpoint.protocol.manifest import Manifest

    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    assert set(Manifest.read(directory).files) <= set(names)
    return names
