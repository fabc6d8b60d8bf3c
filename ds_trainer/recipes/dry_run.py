"""Dry runs of the built-in job: of a recipe, and of a bare model with the arguments of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.recipes.jobs import job_of
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.training.dry_run import Adapt, DryRun, dry_run
from ds_trainer.training.loading.pretrained import from_config
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


def dry_run_of_recipe(
    path: str,
    overrides: Sequence[str],
    ranks: int,
    local_ranks: int = 8,
    device_type: str | None = None,
    device: str | None = None,
    replace_transformers: Callable[[], None] | None = None,
) -> DryRun:
    """Rehearse ``ds-trainer train PATH`` with ``overrides``, as rank 0 of ``ranks``; see :func:`dry_run`.

    Args:
        path, overrides: the recipe.
        ranks, local_ranks, device_type, device: see :func:`dry_run`.
        replace_transformers: called before a task that uses a library's trainer. From then on, arguments join the
            process group when they are made, so there is the fake one first.

    Raises:
        ConfigError: ``ds-trainer train`` would raise it too.
    """
    recipe = load_recipe(path, overrides, runs=True)
    args, job = recipe.training_arguments(), job_of(recipe)

    def make(adapt: Adapt) -> Trainer:
        if recipe.task.uses_library and replace_transformers is not None:
            replace_transformers()
        adapted = adapt(job.arguments() if recipe.task.uses_library else args)
        job.prepare(adapted)
        return job.make_trainer(adapted)

    return dry_run(make, ranks, local_ranks, device_type, args.resume_from_checkpoint, device)


def dry_run_of_model(
    config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    length: int,
    ranks: int,
    local_ranks: int = 8,
    device_type: str | None = None,
    device: str | None = None,
) -> DryRun:
    """Rehearse a training of a new model, on as many made-up samples as two steps take; see :func:`dry_run`.

    Args:
        config: the content of a ``config.json`` of transformers.
        arguments: for ``TrainingArguments``, such as a plan's.
        length: tokens of a sequence.
        ranks, local_ranks, device_type, device: see :func:`dry_run`.

    Raises:
        ConfigError: the layout, the arguments or the model cannot work.
    """
    from transformers import AutoConfig

    from ds_trainer.training.trainer import Trainer

    fields = dict(config)
    try:
        architecture = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # code of any configuration, which may raise anything
        raise ConfigError(f"The model's configuration cannot be read: {' '.join(str(error).split())[:400]}") from error
    args = TrainingArguments("dry_run", max_steps=2, report_to="none", **arguments)

    def make(adapt: Adapt) -> Trainer:
        adapted = adapt(args)
        auto_class = None if architecture.architectures else "AutoModelForCausalLM"
        model = from_config(architecture, auto_class, dtype=torch.float32, seed=args.seed)
        samples = MadeUpSamples(2 * ranks * args.per_device_train_batch_size * args.gradient_accumulation_steps, length)
        return Trainer(model, adapted, train_dataset=samples)

    return dry_run(make, ranks, local_ranks, device_type, device=device)


class MadeUpSamples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """``samples`` times ``length`` tokens of id 0, which take no memory until they are asked for.

    Attributes:
        sequence_length: ``length``.
    """

    def __init__(self, samples: int, length: int) -> None:
        self._samples, self.sequence_length = samples, length

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(self.sequence_length, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}
