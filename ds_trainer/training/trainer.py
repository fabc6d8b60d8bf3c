"""``Trainer``: the public class. Its ``train`` method is the outline of a run: check, build, restore, loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.compat.library_arguments import own_arguments
from ds_trainer.arguments.enums import SaveStrategy
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.checkpoint.background.background_save import finish_before_sigterm
from ds_trainer.checkpoint.protocol.checkpoint_directory import find_checkpoint
from ds_trainer.data.collators import collator_for
from ds_trainer.training.assembly import Assembly
from ds_trainer.training.evaluation.labels import returns_loss_by_default
from ds_trainer.training.loading.model_argument import defer_to_checkpoint, put_on_device
from ds_trainer.training.loop.batches import check_dataset
from ds_trainer.training.loop.run_plan import RunPlan
from ds_trainer.training.model.gradient_checkpointing import gradient_checkpointing_problems
from ds_trainer.training.model.preparation import prepared_for_training
from ds_trainer.training.out_of_memory import Remedy, explained_out_of_memory, startup_remedies, training_remedies
from ds_trainer.training.resume.compatibility import Changes
from ds_trainer.training.resume.output_directory import OutputDirectory
from ds_trainer.training.resume.resumption import Resumption
from ds_trainer.training.signatures import is_overridden
from ds_trainer.training.startup.batch_size_search import find_batch_size
from ds_trainer.training.startup.constructor_checks import (
    check_construction,
    default_arguments,
    renamed_processing_class,
    replica_problems,
)
from ds_trainer.training.startup.preflight import check_start
from ds_trainer.training.startup.process_setup import configure_process, create_accelerator_state, join_ranks
from ds_trainer.training.startup.run_header import print_header
from ds_trainer.training.stopping.stop_controller import StopController
from ds_trainer.training.train_loop import TrainOutput
from ds_trainer.utils import distributed
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.host_votes import host_votes
from ds_trainer.utils.problems import Problems
from ds_trainer.utils.replaced_transformers import is_replaced

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Methods whose override by a subclass changes how a run works.
_OVERRIDABLE = (
    *("compute_loss", "training_step", "get_batch_samples", "floating_point_ops"),
    *("compute_loss_context_manager", "autocast_smart_context_manager"),
    *("create_optimizer", "create_scheduler", "get_train_dataloader", "get_eval_dataloader"),
    *("_prepare_inputs", "_get_train_sampler", "save_model", "_save", "_save_checkpoint"),
)


class Trainer(Assembly):
    """Trains and evaluates a model on a DeepSpeed engine.

    Args:
        model: an ``nn.Module`` whose keyword arguments are the items of a batch, and that returns its loss (a scalar,
            the first element of a tuple, or the item ``"loss"``); or a directory or hub name, from which each rank
            reads its shards (docs/how-to/loading.md); or a configuration of transformers, for a new model; or None
            with ``model_init``.
        args: the training arguments, also those of transformers; default: ``TrainingArguments("tmp_trainer")``.
        data_collator: converts a list of samples to a batch (a dict of tensors); default:
            :func:`ds_trainer.data.collators.default_data_collator`, or padding if ``processing_class`` is a
            tokenizer or feature extractor.
        train_dataset: an object with ``__len__`` and ``__getitem__``, or one that can only be iterated
            (:mod:`ds_trainer.data.stream`).
        eval_dataset: the same for evaluation, or a dict of several.
        processing_class: tokenizer or processor, saved with the weights.
        model_init: returns the model, or its name, so that every :meth:`train` starts from a new one.
        compute_loss_func: ``f(outputs, labels, num_items_in_batch=...)`` that returns the summed loss divided by this
            number.
        compute_metrics: computes the metrics of an evaluation from predictions and labels.
        callbacks: classes or instances, added to the default ones.
        optimizers: optimizer and schedule to use instead of those that ``args`` describe.
        optimizer_cls_and_kwargs: class and arguments of the optimizer to use instead of the one that ``args`` describe;
            it gets the parameter groups of the Trainer.
        preprocess_logits_for_metrics: ``f(logits, labels)`` that returns what to keep of the logits of each batch.
        peft_config: a configuration of PEFT: the model gets new adapters, and only they are trained.
        tokenizer: older name of ``processing_class``.

    Raises:
        ConfigError: the run cannot work; raised before any process group exists.

    Attributes:
        model: the model itself, never wrapped.
        model_wrapped: the outermost module, to be called in the forward pass: the DeepSpeed engine while there is one.
        can_return_loss: whether the model returns a loss without labels; a subclass may set it.
        is_in_train: whether :meth:`train` is running.
        place_model_on_device: whether the constructor moves the model to the device; False, because the engine does it.
        is_model_parallel: False: the engine shards layers, never the model itself.
        state, control, callback_handler: state, control and handler of the callbacks.
        optimizer, lr_scheduler: those passed to the constructor; after training has begun, those in use.

    The methods that a subclass may override are in ``ds_trainer/training/overrides``, one file per topic. Names and
    meanings are those of ``transformers.Trainer`` (transformers 5).
    """

    def __init__(
        self,
        model: nn.Module | str | os.PathLike[str] | PretrainedConfig | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        peft_config: Any = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        check_construction(model, model_init, optimizers, optimizer_cls_and_kwargs, data_collator)
        args = default_arguments() if args is None else own_arguments(args)
        processing_class = renamed_processing_class(processing_class, tokenizer)
        self.overridden = frozenset(name for name in _OVERRIDABLE if is_overridden(self, Trainer, name))
        self.make_components(args, processing_class)
        with self.memory_tracker.stage("init"):
            configure_process(args)
            self.model_init = model_init
            self.peft_config = peft_config
            self.use_model(self.module_of(model) if model is not None else self.call_model_init())
            self.is_model_parallel = False
            self.place_model_on_device = bool(getattr(args, "place_model_on_device", None))
            if self.place_model_on_device:
                put_on_device(self.model, self.device)
            self.processing_class = processing_class
            self.data_collator = collator_for(processing_class) if data_collator is None else data_collator
            self.train_dataset = train_dataset
            self.eval_dataset = eval_dataset
            self.compute_loss_func = compute_loss_func
            self.compute_metrics = compute_metrics
            self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
            self.user_optimizers = optimizers
            self.use_optimizers(*optimizers)
            self.optimizer_class = None
            if optimizer_cls_and_kwargs is not None:
                origin = f"optimizer_cls_and_kwargs=({optimizer_cls_and_kwargs[0].__name__}, ...) passed to the Trainer"
                self.optimizer_class = (*optimizer_cls_and_kwargs, origin)
            self.is_in_train = False
            self.configure()
            self.can_return_loss = returns_loss_by_default(self.model)
            if is_replaced():
                create_accelerator_state(args, self.accelerator.mixed_precision)
            self.add_callbacks(callbacks or ())
            self.events.state = self.new_state()
            if args.push_to_hub:
                self.publisher.open()
            if args.should_save:
                self.output_dir.mkdir(parents=True, exist_ok=True)  # scripts write to it before they train
            self.events.notify("on_init_end")

    # -- train --------------------------------------------------------------------------------------------------------

    @fails_together
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end of ``args``.

        Args:
            resume_from_checkpoint: path of a checkpoint, or True for the newest valid one in ``args.output_dir``.
                A checkpoint of DeepSpeed or of transformers.Trainer is converted first.
            trial: values of arguments for this training, by name, or an optuna trial. The model is then new, and the
                Trainer has a changed copy of its arguments until it trains without a trial again.
            ignore_keys_for_eval: keys of the model's output that are not predictions, for evaluations during training.

        Returns:
            Steps done, mean training loss, metrics.

        Raises:
            ConfigError: no training data, or a checkpoint that does not fit.
            TrainingStopped: a signal, a stop file or a time limit stopped it between two steps, at a checkpoint. It is
                a SystemExit: unless it is caught, the process ends with the exit code that batch scripts expect.
        """
        self.trials.select(trial, self.model_init)
        self._check_can_train()
        self.note_ignored_overrides()
        requested = find_checkpoint(resume_from_checkpoint, self.output_dir) if resume_from_checkpoint else None
        directory = OutputDirectory(self.args)

        with self._training(directory) as (stop, parts), self._explained_out_of_memory():
            check_start(self.args, self.model, self.compiled, self.layout)
            self.events.agree_on_user_callbacks()
            directory.acquire()
            checkpoint = None
            automatic = directory.resumes_automatically and trial is None
            if resume_from_checkpoint or (automatic and directory.has_checkpoints()):
                checkpoint, _ = directory.choose(directory.imported(requested, self.describe_running_model))
            elif trial is None:
                directory.warn_of_checkpoints()
            self.start_fresh()
            if self.args.auto_find_batch_size:
                find_batch_size(
                    self.args,
                    self.get_total_train_batch_size(),
                    self.optimizer,
                    self.rehearse,
                    self.resize_micro_batch,
                )

            loader = self.get_train_dataloader()
            plan, resumption, changes = self._plan(loader, checkpoint)
            self.build_engine(plan.max_steps)
            self.events.state = self.new_state(plan)
            run = self.training_run(plan, loader)
            checkpointer = self.make_checkpointer(run, directory, stop)
            parts.callback(checkpointer.close)
            stop.before_exit = checkpointer.finish_before_exit
            checkpointer.start(resumption, changes, self.engines.weight_check)
            self._load_optimizer_and_scheduler(None if checkpoint is None else str(checkpoint))
            directory.drop_imported()
            self.estimate_run()
            data, estimate = (self.train_dataset, self.eval_dataset), self.estimator
            print_header(run, self.engines, self.telemetry, *data, checkpoint, estimate.text(), estimate.prediction())
            with prepared_for_training(self.model, self.args, self.layout):
                output = self.train_loop(run, checkpointer, stop, ignore_keys_for_eval).run()
            self.estimator.print_comparison(self.is_world_process_zero())
        self.save_state()
        self.publisher.finish()
        return output

    def _explained_out_of_memory(self) -> AbstractContextManager[None]:
        """Context in which an out-of-memory error ends with what to change."""

        def when() -> str:
            if self.engines.training_or_none is None:
                return "while the engine was built"
            size = self.args.per_device_train_batch_size
            return f"in step {self.state.global_step + 1}, with {size} samples in a micro-batch"

        def remedies() -> list[Remedy]:
            if self.engines.training_or_none is None:
                return startup_remedies(self.compiled, self.layout)
            can_recompute = not gradient_checkpointing_problems(self.model, None, reentrant=False)
            return training_remedies(self.args, self.compiled, self.layout, can_recompute)

        return explained_out_of_memory(when, remedies, self.args.deepspeed)

    @property
    def tokenizer(self) -> Any:
        """Older name of ``processing_class``, as in transformers 4."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    def _check_can_train(self) -> None:
        problems = Problems()
        problems.extend(self.unsharded)
        problems.extend(replica_problems(type(self), self.layout))
        if self.args.memory_check and not self.args.auto_find_batch_size and (estimate := self.estimate_run()):
            problems.extend(estimate.problems())
        if "get_train_dataloader" not in self.overridden:  # else the dataset may be of any kind
            if self.train_dataset is not None:
                with problems.collecting():
                    check_dataset(self.train_dataset, "train_dataset", self.batch_plan)
            else:
                problems.add("train() needs a train_dataset: pass one to the Trainer.")
        problems.raise_if_any()

    @contextmanager
    def _training(self, directory: OutputDirectory) -> Iterator[tuple[StopController, ExitStack]]:
        """Context of a training that releases its resources, however it ends. Collective."""
        args = self.args
        saves = args.enable_jit_checkpoint or (args.save_strategy != SaveStrategy.NO and not args.save_only_model)
        with ExitStack() as outer:
            self.stage = outer.enter_context(self.memory_tracker.stage("train"))
            self.is_in_train = True
            outer.callback(setattr, self, "is_in_train", False)
            outer.callback(directory.release)
            outer.enter_context(self.telemetry.recorder.recorded(lambda: directory.is_ours))
            join_ranks(args)
            votes = host_votes(self.groups.world_host) if distributed.world_size() > 1 else None
            stop = StopController(
                self.output_dir,
                saves,
                not args.save_only_model,
                args.time_limit_margin,
                votes,
                directory.resumes_automatically,
            )
            outer.enter_context(stop)
            if not saves:
                outer.enter_context(finish_before_sigterm(lambda: self._end_by_sigterm(stop)))
            with ExitStack() as parts:
                yield stop, parts

    def _end_by_sigterm(self, stop: StopController) -> None:
        """Finish what is in progress before SIGTERM ends the process."""
        try:
            stop.before_exit()
        finally:
            self.telemetry.recorder.end(None, "killed by SIGTERM")

    def _plan(self, loader: Any, checkpoint: Path | None) -> tuple[RunPlan, Resumption | None, Changes]:
        """The plan of the run, with the description of the run in the checkpoint. Collective.

        Raises:
            ConfigError: the optimizer has changed, or with ``strict_resume`` any argument of the compatibility
                fingerprint, and ``allow_changed_on_resume`` does not allow it.
        """
        args = self.args
        values = self.set_initial_training_values(args, loader)
        plan = RunPlan.of_values(values, args.gradient_accumulation_steps)
        if checkpoint is None:
            return plan, None, Changes({})
        defer_to_checkpoint(self.model, checkpoint)
        resumption = Resumption.of(checkpoint)
        plan = resumption.plan(args, self.batch_plan, plan, loader, self.fingerprint(plan))
        return plan, resumption, resumption.changes(self.fingerprint(plan), args)
