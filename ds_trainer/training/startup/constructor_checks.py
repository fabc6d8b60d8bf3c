"""Checks of the arguments of ``Trainer(...)``, before anything else."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

from torch import nn

from ds_trainer.arguments.compat.renamed_arguments import warn_renamed
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loading.model_argument import is_model_reference
from ds_trainer.training.signatures import is_from
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_ROWS_BY_PROCESS = ("GRPOTrainer", "RLOOTrainer", "SDPOTrainer")


def check_construction(
    model: Any, model_init: Any, optimizers: tuple[Any, Any], optimizer_cls_and_kwargs: Any, data_collator: Any
) -> None:
    """Reject arguments that contradict each other; reports all problems together.

    Raises:
        ConfigError: no model or two, an invalid model, two optimizers, an optimizer together with ``model_init``, or a
            collator that is not callable.
    """
    problems = []
    if (model is None) == (model_init is None):
        problems.append("Pass either a model or a model_init, which creates one, and not both.")
    if model is not None and not isinstance(model, nn.Module) and not is_model_reference(model):
        hint = " Pass the function as model_init." if callable(model) else ""
        problems.append(
            f"model is a {type(model).__name__}, not a torch.nn.Module, the name of a model, or its configuration."
            f"{hint}"
        )
    problems += keras_problems(model)
    placed = getattr(model, "hf_device_map", None)
    if isinstance(placed, dict) and len(set(map(str, placed.values()))) > 1:
        problems.append(
            f"The model is spread over devices already ({', '.join(sorted(set(map(str, placed.values()))))}): load it "
            "without device_map; ZeRO stage 3 (zero_stage=3) shards it."
        )
    if not isinstance(optimizers, tuple) or len(optimizers) != 2:
        problems.append(f"optimizers={optimizers!r} must be a pair (optimizer, schedule); either may be None.")
    elif optimizers != (None, None):
        if optimizer_cls_and_kwargs is not None:
            problems.append("Both optimizers and optimizer_cls_and_kwargs are given. Keep one of them.")
        if model_init is not None:
            problems.append(
                "optimizers have the parameters of one model, but model_init creates a new model for every train(). "
                "Pass optimizer_cls_and_kwargs=(class, arguments), or override create_optimizer."
            )
    if data_collator is not None and not callable(data_collator):
        problems.append(f"data_collator is a {type(data_collator).__name__}, which cannot be called with samples.")
    if problems:
        raise ConfigError(problems)


def default_arguments() -> TrainingArguments:
    """The arguments of a Trainer that is given none, with a note of where it writes."""
    args = TrainingArguments("tmp_trainer")
    logger.info("The Trainer was given no args: it uses the defaults, and writes to %s.", args.output_dir)
    return args


def renamed_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """``processing_class``, or the ``tokenizer`` of a script that uses its name in transformers 4.

    Raises:
        ConfigError: both are given.
    """
    if tokenizer is None:
        return processing_class
    if processing_class is not None:
        raise ConfigError("Both processing_class and tokenizer, its older name, are given. Keep processing_class.")
    warn_renamed(["tokenizer is now called processing_class: Trainer(processing_class=...)."])
    return tokenizer


def keras_problems(model: Any) -> list[str]:
    """Reject a bare Keras model: it ignores train() and eval(), so it would train in inference mode."""
    if not is_from(model, "keras"):
        return []
    name = type(model).__name__
    return [f"{name} is a Keras model, which ignores train() and eval(): pass ds_trainer.KerasModule(model)."]


def replica_problems(trainer: type, layout: ParallelLayout) -> list[str]:
    """Reject trainers of libraries that need one rank per replica.

    Those of TRL that draw samples gather rewards, take their own rows by ``accelerator.process_index``, and divide by
    ``num_processes``. Both count ranks, but the ranks of a replica have the same samples, which are gathered once.
    Those of sentence-transformers run the model on the main process when they save it, for the model card.

    Args:
        trainer: the class of the Trainer.
        layout: the layout of the job.
    """
    by_process = _base_class(trainer, "trl.", _ROWS_BY_PROCESS)
    if by_process is not None and layout.replica_size > 1:
        return [
            f"{by_process} of TRL takes the rewards of a rank by accelerator.process_index, so every rank must have "
            f"samples of its own, but this is {layout.describe()}. Set tensor_parallel_size, context_parallel_size and "
            "sequence_parallel_size to 1; zero_stage=3 shards the weights over all ranks."
        ]
    runs_alone = _base_class(trainer, "sentence_transformers.")
    if runs_alone is not None and layout.tp > 1:
        return [
            f"{runs_alone} of sentence-transformers runs the model on one rank when it saves it, but with "
            f"tensor_parallel_size={layout.tp} every rank has a part of each layer. Set tensor_parallel_size=1; "
            "zero_stage=3 shards the weights over all ranks."
        ]
    return []


def _base_class(trainer: type, package: str, names: Sequence[str] | None = None) -> str | None:
    """The first base class of ``trainer`` that is from ``package``, and one of ``names`` if those are given."""
    own = (cls.__name__ for cls in trainer.__mro__ if cls.__module__.startswith(package))
    return next((name for name in own if names is None or name in names), None)


def create_output_directory(args: TrainingArguments) -> None:
    """Create ``output_dir``.

    Raises:
        ConfigError: it cannot be created or written to.
    """
    try:
        str(args.output_dir).encode()  # it is written to JSON files
        os.makedirs(str(args.output_dir), exist_ok=True)
        with tempfile.TemporaryFile(dir=str(args.output_dir)):
            pass
    except (OSError, ValueError, RecursionError) as error:  # a null byte; thousands of folders
        raise ConfigError(
            f"output_dir={str(args.output_dir)[:200]!r} ({args.where('output_dir')}) cannot be created or written to: "
            f"{getattr(error, 'strerror', None) or error}. Choose another directory."
        ) from None
