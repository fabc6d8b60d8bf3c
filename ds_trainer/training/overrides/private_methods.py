"""Private methods of transformers' Trainer that subclasses of other libraries override or call.

Three kinds, in docs/reference/private-methods.md:

- *In use*: methods of :class:`PrivateMethods`. The Trainer calls them where transformers does and uses their results.
  Those of :class:`ds_trainer.training.overrides.called_methods.CalledMethods` are for calls by scripts.
- *Not called* (:data:`NOT_CALLED`): an override has no effect, because the engine does this work exactly. Subclasses
  with one work; a note in the log says so.
- *Refused* (:data:`REFUSED`): an override would be expected to change the loop. Defining one, or reading such a name,
  raises an error with the alternative.

Source: ``transformers/trainer.py`` of transformers 5, and the trainers of TRL, sentence-transformers and SetFit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ds_trainer.data.collators import ColumnFilterCollator
from ds_trainer.data.columns import accepted_columns, drop_unused_columns
from ds_trainer.data.source_ids import SOURCE_IDS, source_names
from ds_trainer.data.stream import is_stream
from ds_trainer.optim.schedule_stepping import current_lr
from ds_trainer.training.loop.batches import EpochOrder, Sampling
from ds_trainer.training.loop.run_plan import batch_plan_of
from ds_trainer.training.overrides.called_methods import CalledMethods, MeasuredStages
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

OWN_ORDER = "_get_train_sampler"
_RESUME = "train(resume_from_checkpoint=...) restores it; remove the call"
_SAVE = "checkpoints hold it: call save_checkpoint()"
NOT_CALLED = {
    "_load_from_checkpoint": "train(resume_from_checkpoint=...) restores all weights by name; to load weights alone, "
    "call from_pretrained before the Trainer is made",
    "_load_best_model": "set load_best_model_at_end=True, and train() ends with the best weights",
    "_push_from_checkpoint": "pushes call save_model, which calls _save; call push_to_hub()",
    "_wrap_model": "the DeepSpeed engine is the only wrapper",
    "_issue_warnings_after_load": "missing and unexpected weights of checkpoints are errors that name them",
    "_hp_search_setup": "trials get their arguments from hyperparameter_search",
    "_load_rng_state": f"random states are in the checkpoint of each rank, and {_RESUME}",
    "_save_rng_state": f"random states are in the checkpoint of each rank; {_SAVE}",
    "_load_scaler": f"DeepSpeed holds the loss scale, and {_RESUME}",
    "_save_scaler": f"DeepSpeed holds the loss scale; {_SAVE}",
    "_save_optimizer_and_scheduler": f"optimizer and schedule are saved in shards; {_SAVE}",
    "_load_callback_state": f"states of callbacks are restored before on_train_begin, and {_RESUME}",
    "_move_model_to_device": "the engine moves and shards the trained model",
    "_sync_replicated_trainable_parameters": "the engine does it when it is built; remove the call",
    "_update_auto_batch_size": "auto_find_batch_size=True changes the arguments before the engine is built",
    "_validate_args": "arguments are checked when they are made; call args.complete() after a change",
    "_build_accelerator_args": "trainer.accelerator follows from the arguments",
    "_nested_gather": "results of an evaluation are gathered in pieces",
    "_pad_across_processes": "results of an evaluation are padded when they are gathered",
    "_gather_and_numpify": "results of an evaluation are gathered in pieces",
    "_evaluate": "override evaluate, or call it",
    "_rotate_checkpoints": "save_total_limit removes checkpoints after each save",
    "_sorted_checkpoints": "list args.output_dir yourself, or read state.best_model_checkpoint",
    "_activate_neftune": "set neftune_noise_alpha",
    "_deactivate_neftune": "the hook of neftune_noise_alpha is removed after train()",
    "_fsdp_qlora_plugin_updates": "DeepSpeed shards quantized weights itself",
    "_add_sm_patterns_to_gitignore": "SageMaker is not supported",
    "ipex_optimize_model": "set torch_compile=True",
    "torch_jit_model_eval": "set torch_compile=True",
    "propagate_args_to_deepspeed": "the configuration is compiled from the arguments when the Trainer is made",
}
"""Methods whose override has no effect, with what to write instead; some can be called (:class:`CalledMethods`)."""
_LOOP = "the loop is that of the DeepSpeed engine. Override training_step or compute_loss, or use a TrainerCallback"
REFUSED = {
    "_inner_training_loop": _LOOP,
    "_run_epoch": _LOOP,
    "_prepare_for_training": _LOOP,
    "_init_training_state": _LOOP,
    "_finalize_training": "use TrainerCallback.on_train_end",
    "_maybe_log_save_evaluate": "use TrainerCallback.on_step_end and the decisions in control, and override log",
    "_determine_best_metric": "set metric_for_best_model, or override evaluate and return the metric",
    "_clip_grad_norm": "set max_grad_norm",
    "_prepare_context_parallel_inputs": "sequences are sharded by context_parallel_size and sequence_parallel_size",
    "_track_num_input_tokens": "set include_num_input_tokens_seen",
    "_tune_save_checkpoint": "pass a backend to hyperparameter_search",
    "_report_to_hp_search": "pass compute_objective to hyperparameter_search",
    "_finish_current_push": "trainer.push_to_hub(blocking=True) waits for its end",
    "_total_loss_scalar": "train() returns the mean loss as training_loss",
    "_globalstep_last_logged": "use trainer.state.log_history",
    "_tr_loss": "read the loss in TrainerCallback.on_log",
    "_initial_global_step": "read state.global_step in TrainerCallback.on_train_begin",
    "_initial_num_input_tokens_seen": "read state.num_input_tokens_seen in TrainerCallback.on_train_begin",
    "_loss_shifts_labels": "set shifts_labels on the model",
    "_defer_fsdp_gradient_reduction": "DeepSpeed reduces gradients as the ZeRO stage requires",
    "_has_mixed_mesh_grads": "DeepSpeed reduces gradients as the ZeRO stage requires",
    "_mixed_mesh_grad_norm": "DeepSpeed computes the norm over all shards",
}
"""Names that raise an error, with the alternative."""
VALUES: dict[str, Any] = {
    **dict.fromkeys(("use_apex", "use_cuda_amp", "use_cpu_amp", "do_grad_scaling"), False),
    **dict.fromkeys(("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled"), False),
    **dict.fromkeys(("is_distributed_loading_by_transformers", "_mixed_mesh_grads", "_loggers_initialized"), False),
    **dict.fromkeys(("sharded_ddp", "fsdp", "push_in_progress", "_trial"), None),
}
"""Attributes that say what this Trainer does not do, also those of transformers 4."""


class PrivateMethods(CalledMethods):
    """The private methods of transformers' Trainer that have a meaning here."""

    _signature_columns: list[str] | None = None
    """Columns that the model accepts; None: not asked yet, or any."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Refuse a subclass that overrides a method of :data:`REFUSED`.

        Raises:
            ConfigError: one sentence for each such method.
        """
        super().__init_subclass__(**keywords)
        problems: list[str] = []
        for base in cls.__mro__:  # of mixins, too
            if not base.__module__.startswith("ds_trainer."):
                problems += [_refusal(f"{base.__qualname__}.{name}", name) for name in REFUSED if name in vars(base)]
        if problems:
            raise ConfigError(problems)

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes only.
        if name in VALUES:
            return VALUES[name]
        if name == "gather_function":
            return self.accelerator.gather_for_metrics
        if name == "_created_lr_scheduler":
            return self.lr_scheduler is not None and self._ds_trainer.user_optimizers[1] is None
        if name == "_memory_tracker":
            return vars(self).setdefault(name, MeasuredStages(self._ds_trainer.memory_tracker))
        if name in REFUSED:
            raise AttributeError(_refusal(f"{type(self).__name__}.{name}", name), name=name, obj=self)
        if name in NOT_CALLED:
            raise AttributeError(
                f"{type(self).__name__}.{name} does not exist: {NOT_CALLED[name]}.", name=name, obj=self
            )
        further = getattr(super(), "__getattr__", None)  # of a class behind the Trainer, such as a module's
        if further is not None:
            return further(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    # -- columns ------------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        """Set ``_signature_columns``: what ``model.forward`` names, and labels. Override it for other columns."""
        if self._signature_columns is None:
            columns = accepted_columns(self.model, self.label_names)
            self._signature_columns = None if columns is None else sorted(columns)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """``dataset`` with the columns of ``_signature_columns`` only, unless ``remove_unused_columns=False``.

        Args:
            dataset: a ``datasets.Dataset``; any other dataset is returned unchanged.
            description: ignored; part of the signature in transformers.
        """
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        of_library = _is_of_library(self._set_signature_columns_if_needed)  # it has made others of them
        return drop_unused_columns(dataset, self.model, self._signature_columns, of_library)

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """``data_collator`` for samples from which all other keys were removed, unless ``remove_unused_columns=False``.

        Args:
            data_collator: returns a batch for a list of samples.
            description: ignored; part of the signature in transformers.
        """
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        wanted = self._signature_columns
        evaluated = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        if wanted is not None and any(map(source_names, [self.train_dataset, *evaluated])):
            wanted = [*wanted, SOURCE_IDS]
        return ColumnFilterCollator(data_collator, self.model, wanted)

    # -- samplers and loaders -----------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """The order of the training samples over all replicas; None for a stream. Override it for another order.

        A sampler yields dataset positions, the same on all ranks; it may repeat or leave out some. Each global batch is
        the next part of it. It is iterated once for each epoch.
        """
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or is_stream(dataset):
            return None
        sampling = Sampling(self.args, dataset, self.processing_class)
        return EpochOrder(sampling, batch_plan_of(self.args, self._ds_trainer.layout), len(dataset))

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """The order of an evaluation over all replicas; None for that of the dataset. Override it for another one."""
        return None

    def _get_dataloader(
        self,
        dataset: Dataset[Any],
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Sampler[int] | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """A torch loader of ``batch_size`` samples for each replica, prepared by ``accelerator.prepare``.

        For subclasses whose batches are not those of the arguments, such as batches to generate from.

        Args:
            dataset: the data; columns that the model does not accept are removed.
            description: ignored; part of the signature in transformers.
            batch_size: samples of one replica.
            sampler_fn: returns the order for ``dataset``; default: its own. Not used for streams.
            is_training: whether the seeds of workers follow from ``data_seed``.
            dataloader_key: ignored; loaders of a subclass are not kept.
        """
        args, workers = self.args, self.args.dataloader_num_workers
        dataset = self._remove_unused_columns(dataset, description)
        collator = self._get_collator_with_removed_columns(self.data_collator, description)
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "collate_fn": collator,
            "num_workers": workers,
            "pin_memory": args.dataloader_pin_memory and args.device_type == "cuda",
            "persistent_workers": args.dataloader_persistent_workers and workers > 0,
        }
        if workers > 0:
            options["prefetch_factor"] = args.dataloader_prefetch_factor
        if not is_stream(dataset):
            options["sampler"] = None if sampler_fn is None else sampler_fn(dataset)
            options["drop_last"] = args.dataloader_drop_last
            if is_training:
                options["generator"] = torch.Generator().manual_seed(
                    args.seed if args.data_seed is None else args.data_seed
                )
        return self.accelerator.prepare(DataLoader(dataset, **options))

    # -- training and saving ------------------------------------------------------------------------------------------

    def _get_learning_rate(self) -> float:
        """The current learning rate of the first parameter group. Waits for the device if it is a tensor there."""
        return float(current_lr(self.optimizer))

    def _get_output_dir(self, trial: Any = None) -> str:
        """The directory of the run; during a hyperparameter search, that of the current trial."""
        return str(self._ds_trainer.output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Called after optimizer and schedule were restored. Override it to restore more.

        Args:
            checkpoint: the directory from which the run resumes; None for a new run.
        """


def _is_of_library(method: Any) -> bool:
    """Whether a method is that of an installed package, which nobody changes who reads a note."""
    name = str(getattr(method, "__module__", None))
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file and not name.startswith("ds_trainer.")


def note_ignored_overrides(trainer: type) -> None:
    """Write to the log which private methods of a subclass are not called; those of a library nobody can remove."""
    for name, reason in NOT_CALLED.items():
        override = getattr(trainer, name, None)
        if override is not getattr(PrivateMethods, name, None) and not _is_of_library(override):
            logger.info("%s.%s is not called: %s.", trainer.__name__, name, reason)


def _refusal(what: str, name: str) -> str:
    return f"{what} is private to transformers' Trainer and has no counterpart in ds_trainer: {REFUSED[name]}."
