"""Methods that set groups of arguments: ``args.set_training(...).set_save(...)``. The signatures are Hugging Face's.

A setter sets its whole group: a value that is not passed takes the setter's default, which may differ from the field's
(``set_logging`` logs on the first node only; the default of ``log_on_each_node`` is every node).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import warn

if TYPE_CHECKING:
    from typing_extensions import Self


class Setters:
    """The nine setters. Each returns the same object, so that calls can be chained.

    All of them raise :class:`ConfigError` if a value is invalid, alone or with the other arguments. The object is then
    unchanged.
    """

    if TYPE_CHECKING:

        def change(self, **values: Any) -> Self:
            """Set these fields and run all checks and conversions again; on a problem raise and change nothing."""

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Self:
        """Set the basic training arguments and ``do_train``.

        Args:
            learning_rate: peak learning rate.
            batch_size: samples per replica in one forward pass (``per_device_train_batch_size``).
            weight_decay: weight decay of all parameters except biases and norms.
            num_epochs: passes over the training data (``num_train_epochs``); may be fractional.
            max_steps: number of optimizer steps; a positive value overrides ``num_epochs``.
            gradient_accumulation_steps: micro-batches per optimizer step.
            seed: seed of all random number generators.
            activation_checkpointing: recompute activations in the backward pass.
            gradient_checkpointing: deprecated name of ``activation_checkpointing``; takes precedence if given.
        """
        if gradient_checkpointing is not None:
            warn(
                f"gradient_checkpointing={gradient_checkpointing!r} is deprecated: write "
                f"activation_checkpointing={gradient_checkpointing!r}.",
                FutureWarning,
                stacklevel=2,
            )
            activation_checkpointing = gradient_checkpointing
        return self.change(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
            gradient_checkpointing=activation_checkpointing,  # the old name keeps the same value
        )

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Self:
        """Set the evaluation arguments, and ``do_eval`` unless ``strategy`` is ``"no"``.

        Args:
            strategy: when to evaluate during training: ``"no"``, ``"steps"`` or ``"epoch"``.
            steps: optimizer steps between evaluations, for ``"steps"``.
            batch_size: samples per replica in one forward pass (``per_device_eval_batch_size``).
            accumulation_steps: batches of predictions kept on the device before they move to host memory; None: all.
            delay: epochs or steps before the first evaluation; None: no delay.
            loss_only: return only the loss.
        """
        _refuse_zero_steps("set_evaluate", strategy, steps)
        return self.change(
            eval_strategy=_value(strategy),
            do_eval=_value(strategy) != "no",
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=0 if delay is None else delay,  # transformers stores None and fails when comparing it
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set the arguments of testing on held-out data, and ``do_predict``.

        Args:
            batch_size: samples per replica in one forward pass (``per_device_eval_batch_size``).
            loss_only: return only the loss.
        """
        return self.change(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self,
        strategy: str | SaveStrategy | IntervalStrategy = "steps",
        steps: int = 500,
        total_limit: int | str | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set the checkpoint arguments.

        Args:
            strategy: when to save: ``"no"``, ``"steps"``, ``"epoch"`` or ``"best"``.
            steps: optimizer steps between checkpoints, for ``"steps"``.
            total_limit: keep at most this many checkpoints, or as many as fit into a size such as ``"500GB"``; None:
                keep all.
            on_each_node: write files that exist once on every node; not for a shared file system.
        """
        _refuse_zero_steps("set_save", strategy, steps)
        return self.change(
            save_strategy=_value(strategy),
            save_steps=steps,
            save_total_limit=total_limit,
            save_on_each_node=on_each_node,
        )

    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set the logging arguments.

        Args:
            strategy: when to log: ``"no"``, ``"steps"`` or ``"epoch"``.
            steps: optimizer steps between logs, for ``"steps"``.
            report_to: trackers that receive the logs, ``"all"`` or ``"none"``.
            level: level of this package's loggers on the main process; ``"passive"`` leaves it unchanged.
            first_step: log the first step too.
            nan_inf_filter: filter NaN and infinite losses out of the logged loss.
            on_each_node: log on the main process of every node, not only of the first.
            replica_level: the level on all other processes.
        """
        _refuse_zero_steps("set_logging", strategy, steps)
        return self.change(
            logging_strategy=_value(strategy),
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Set the arguments of pushing to the Hugging Face Hub, and ``push_to_hub``.

        Args:
            model_id: the repository, ``name`` or ``owner/name``.
            strategy: ``"end"``, ``"every_save"``, ``"checkpoint"`` (also the last one, to resume from) or
                ``"all_checkpoints"``.
            token: token for pushing; None: the token of ``hf auth login``.
            private_repo: make the repository private; None: the owner's default.
            always_push: push even if the previous push is still running.
            revision: branch to push to.
        """
        return self.change(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=_value(strategy),
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer and its arguments.

        Args:
            name: the optimizer (``optim``).
            learning_rate: peak learning rate.
            weight_decay: weight decay of all parameters except biases and norms.
            beta1: Adam family: decay rate of the first moment.
            beta2: Adam family: decay rate of the second moment.
            epsilon: Adam family: added to the denominator.
            args: extra arguments as ``"name=value,name=value"`` (``optim_args``).
        """
        return self.change(
            optim=_value(name),
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
    ) -> Self:
        """Set the learning rate schedule and the length of training.

        Args:
            name: the schedule (``lr_scheduler_type``).
            num_epochs: passes over the training data; may be fractional.
            max_steps: number of optimizer steps; a positive value overrides ``num_epochs``.
            warmup_steps: linear warmup steps; below 1 a fraction of all steps.
        """
        return self.change(
            lr_scheduler_type=_value(name),
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            warmup_steps=warmup_steps,
        )

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set the data loading arguments.

        Args:
            train_batch_size: samples per replica in one forward pass (``per_device_train_batch_size``).
            eval_batch_size: the same in evaluation.
            drop_last: drop the samples of an incomplete last micro-batch.
            num_workers: number of data loading workers; 0 loads in the training process.
            pin_memory: page-locked host memory for faster copies to a GPU.
            persistent_workers: keep the workers between epochs.
            prefetch_factor: batches that each worker prefetches.
            multiprocessing_context: how workers are started: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
            in_order: return batches in order, whichever worker is ready first.
            auto_find_batch_size: halve the micro-batch if memory runs out.
            ignore_data_skip: start the data from the beginning when resuming.
            sampler_seed: seed of the order of samples (``data_seed``); None: ``seed``.
        """
        return self.change(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )


def _value(choice: str | Enum) -> Any:
    """The plain value of a choice, which may be a member of any enum."""
    return choice.value if isinstance(choice, Enum) else choice


def _refuse_zero_steps(setter: str, strategy: str | Enum, steps: int) -> None:
    # As a field, 0 means "not given" (eval_steps falls back to logging_steps). Passed to a setter it is a mistake.
    if _value(strategy) == "steps" and steps == 0:
        raise ConfigError(f"{setter}(strategy='steps', steps=0): steps must be positive; use 'no' to turn it off.")
