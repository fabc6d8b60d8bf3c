"""``Trainer``: the public class. Its ``train`` method is the outline of a run: check, build, restore, loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.compat.library_arguments import own_arguments
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.defaults import DefaultFlowCallback, PrinterCallback, ProgressCallback
from ds_trainer.callbacks.integrations import reporting_callbacks
from ds_trainer.callbacks.metrics_recorder import MetricsFileCallback
from ds_trainer.callbacks.state import TrainerState
from ds_trainer.data.collators import collator_for
from ds_trainer.training.assembly import Assembly
from ds_trainer.training.evaluation.labels import returns_loss_by_default
from ds_trainer.training.loading.model_argument import put_on_device
from ds_trainer.training.model.preparation import prepared_for_training
from ds_trainer.training.overrides.evaluation_methods import EvaluationMethods
from ds_trainer.training.overrides.optimization import Optimization, use_optimizers
from ds_trainer.training.overrides.private_methods import note_ignored_overrides
from ds_trainer.training.overrides.saving import Saving
from ds_trainer.training.overrides.search_methods import SearchMethods
from ds_trainer.training.protocol import check_kept, check_names
from ds_trainer.training.signatures import is_overridden
from ds_trainer.training.startup.constructor_checks import (
    check_construction,
    create_output_directory,
    default_arguments,
    renamed_processing_class,
)
from ds_trainer.training.startup.process_setup import configure_process, create_accelerator_state
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.replaced_transformers import is_replaced

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ds_trainer.training.loop.run_plan import RunPlan
    from ds_trainer.training.train_loop import TrainOutput

logger = get_logger(__name__)

# Methods whose override by a subclass changes how a run works.
_OVERRIDABLE = (
    *("compute_loss", "training_step", "get_batch_samples", "floating_point_ops"),
    *("compute_loss_context_manager", "autocast_smart_context_manager"),
    *("get_optimizer_cls_and_kwargs", "create_optimizer_and_scheduler", "store_flos"),
    *("create_optimizer", "create_scheduler", "get_train_dataloader", "get_eval_dataloader"),
    *("_prepare_input", "_get_num_items_in_batch"),
    *("_prepare_inputs", "_get_train_sampler", "save_model", "_save", "_save_checkpoint"),
)


class Trainer(SearchMethods, EvaluationMethods, Optimization, Saving):
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

    _ds_assembly: type[Assembly] = Assembly
    """The class of the machinery; Trainers of this package extend it."""

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
        check_names(self)
        overridden = frozenset(name for name in _OVERRIDABLE if is_overridden(self, Trainer, name))
        self._ds_trainer = assembly = self._ds_assembly(self, args, processing_class, overridden)
        with assembly.memory_tracker.stage("init"):
            configure_process(args)
            assembly.peft_config = peft_config
            self.model_init = model_init
            assembly.use_model(assembly.module_of(model) if model is not None else self.call_model_init())
            self.is_model_parallel = False
            self.place_model_on_device = bool(getattr(args, "place_model_on_device", None))
            if self.place_model_on_device:
                put_on_device(self.model, assembly.device)
            self.processing_class = processing_class
            self.data_collator = collator_for(processing_class) if data_collator is None else data_collator
            self.train_dataset = train_dataset
            self.eval_dataset = eval_dataset
            self.compute_loss_func = compute_loss_func
            self.compute_metrics = compute_metrics
            self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
            assembly.user_optimizers = optimizers
            use_optimizers(self, *optimizers)
            assembly.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
            self.is_in_train = False
            check_kept(self)
            assembly.configure()
            self.can_return_loss = returns_loss_by_default(self.model)
            if is_replaced():
                create_accelerator_state(args, self.accelerator.mixed_precision)
            _add_callbacks(assembly, callbacks or ())
            assembly.events.state = _new_state(assembly)
            if args.push_to_hub:
                assembly.publisher.open()
            if args.should_save:
                create_output_directory(args)  # scripts write to it before they train
            assembly.events.notify("on_init_end")

    def __copy__(self) -> Trainer:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self), _ds_trainer=self._ds_trainer.copy_for(copied))
        return copied

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
        assembly = self._ds_trainer
        check_names(self)
        assembly.trials.select(trial, self.model_init)
        setup = assembly.setup
        setup.check()
        if self.is_world_process_zero():
            note_ignored_overrides(type(self))
        directory = setup.output_directory(resume_from_checkpoint)

        with setup.entered(directory) as (stop, parts):
            setup.check_start()
            assembly.events.agree_on_user_callbacks()
            directory.acquire()
            checkpoint = directory.resolve(setup.describe_running_model, is_trial=trial is not None)
            assembly.start_fresh()
            if self.args.auto_find_batch_size:
                setup.find_batch_size()

            loader = self.get_train_dataloader()
            plan, resumption, changes = setup.plan(loader, checkpoint)
            assembly.build_engine(plan.max_steps)
            assembly.events.state = _new_state(assembly, plan)
            run = setup.training_run(plan, loader)
            checkpointer = setup.make_checkpointer(run, directory, stop)
            parts.callback(checkpointer.close)
            stop.before_exit = checkpointer.finish_before_exit
            checkpointer.start(resumption, changes, assembly.engines.weight_check)
            self._load_optimizer_and_scheduler(None if checkpoint is None else str(checkpoint))
            directory.drop_imported()
            setup.print_header(run, checkpoint)
            with prepared_for_training(self.model, self.args, assembly.layout):
                output = setup.train_loop(run, checkpointer, stop, ignore_keys_for_eval).run()
            assembly.estimator.print_comparison(self.is_world_process_zero())
        try:
            self.save_state()
        except OSError as error:  # the result of the training is not lost because a disk is full
            logger.error("trainer_state.json was not written to %s: %s.", assembly.output_dir, error)
        assembly.publisher.finish(resumed=checkpoint is not None)
        return output


def _new_state(assembly: Assembly, plan: RunPlan | None = None) -> TrainerState:
    """The state of a new run."""
    trainer, args = assembly.trainer, assembly.args
    state = TrainerState(
        is_local_process_zero=trainer.is_local_process_zero(), is_world_process_zero=trainer.is_world_process_zero()
    )
    if (trial := assembly.trials.trial) is not None:
        state.is_hyper_param_search = True
        state.trial_name, state.trial_params = trial.name, dict(trial.params)
    if plan is not None:
        state.max_steps, state.num_train_epochs = plan.max_steps, plan.epochs
        state.train_batch_size = args.per_device_train_batch_size
        state.compute_steps(args, plan.max_steps)
    return state


def _add_callbacks(assembly: Assembly, user_callbacks: Sequence[Any]) -> None:
    """Add the default callbacks, those of ``report_to``, and the user's, in the order of transformers."""
    trainer, args, handler = assembly.trainer, assembly.args, assembly.events.handler
    trackers = reporting_callbacks(
        args.report_to,
        lambda: assembly.compiled.to_dict(),
        main_process=trainer.is_world_process_zero(),
        first_of_machine=trainer.is_local_process_zero(),
    )
    handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
    handler.own = [MetricsFileCallback()]
    progress = PrinterCallback if args.disable_tqdm else ProgressCallback
    for callback in (DefaultFlowCallback, *trackers, *user_callbacks, progress):
        handler.add_callback(callback)
    assembly.events.user_callbacks = bool(user_callbacks)
