"""``Assembly``: the machinery of a Trainer: its components, its configuration, its model and its engine."""

from __future__ import annotations

import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.accelerator_config import replica_batch_size
from ds_trainer.arguments.redefined import packs
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.state import TrainerState
from ds_trainer.engine.expert_parallel import separate_experts
from ds_trainer.engine.quantized_weights import disable_cpu_repacking
from ds_trainer.monitor.memory_tracker import MemoryTracker
from ds_trainer.optim.library_optimizer_builder import move_grokadamw_state_to_optimizer_state
from ds_trainer.optim.optimizer_builder import parameter_groups, parameters_of_groups
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.groups import ParallelGroups, parallel_groups
from ds_trainer.training.engines import Engines, divide_model
from ds_trainer.training.hub.publisher import HubPublisher
from ds_trainer.training.loading.model_argument import resolve_model
from ds_trainer.training.loading.weight_check import note_origin
from ds_trainer.training.loop.batches import batch_check
from ds_trainer.training.loop.loss_computation import USE_THE_COUNT, LossComputation
from ds_trainer.training.loop.run_plan import RunPlan, batch_plan_of
from ds_trainer.training.loop.source_losses import SourceLosses
from ds_trainer.training.model.preparation import adapt_model, chunked_loss_of, compiles
from ds_trainer.training.overrides.optimization import check_optimizer, use_optimizers
from ds_trainer.training.protocol import TrainerProtocol
from ds_trainer.training.resume.output_directory import write_compiled
from ds_trainer.training.search.trial_runner import TrialRunner
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.training.startup.configuration import TrainerInputs, compile_run, configure
from ds_trainer.training.startup.process_setup import configure_process
from ds_trainer.training.telemetry import Telemetry
from ds_trainer.utils.devices import free_memory
from ds_trainer.utils.seeds import set_seed

if TYPE_CHECKING:
    from ds_trainer.training.evaluation.evaluator import Evaluator
    from ds_trainer.training.loop.packing import Packing
    from ds_trainer.training.loop.step import MicroBatchRunner, StepMethods
    from ds_trainer.training.planning.run_estimator import RunEstimator
    from ds_trainer.training.resume.checkpointer import Checkpointer
    from ds_trainer.training.run_setup import RunSetup


class Assembly:
    """Builds the components of a Trainer, and rebuilds them if arguments or model change.

    Methods that a subclass may override are called on ``trainer``. All else is kept here: every name that transformers'
    Trainer does not have belongs to the script.

    Args:
        trainer: the Trainer.
        args: its training arguments.
        processing_class: for the callbacks.
        overridden: names of the methods that its class overrides.

    Attributes:
        trainer, overridden: see above.
        events, engines, losses, telemetry, publisher, trials, estimator: the components (docs/architecture.md).
        memory_tracker: measures memory; does nothing without ``skip_memory_metrics=False``.
        micro_batches: runs forward and backward passes; exists as long as the engine of a training.
        checkpointer: saves and restores the current or last training.
        device: the device of this rank.
        peft_config, user_optimizers: ``peft_config`` and ``optimizers`` of the constructor.
        optimizer_class: class, arguments and origin of ``optimizer_cls_and_kwargs``.
        group_parameters: the model parameters in each parameter group: ZeRO replaces them by its flat partitions.
        layout, compiled: the layout of the job; the DeepSpeed configuration.
        unsharded: reasons against the sequence sharding that the layout requests; if there are any, training is not
            possible.
        eval_loaders: dataset, collator, sizes and loader by name of the evaluation dataset
            (``dataloader_persistent_workers``).
    """

    def __init__(
        self, trainer: TrainerProtocol, args: TrainingArguments, processing_class: Any, overridden: frozenset[str]
    ) -> None:
        self.trainer = trainer
        self.overridden = overridden
        self.peft_config: Any = None
        self.user_optimizers: tuple[Any, Any] = (None, None)
        self.optimizer_class: tuple[type[torch.optim.Optimizer], dict[str, Any], str] | None = None
        self.group_parameters: list[list[Any]] | None = None
        self.micro_batches: MicroBatchRunner | None = None
        self.checkpointer: Checkpointer | None = None
        self.eval_loaders: dict[str, tuple[Any, Any, Any, Any]] = {}
        self._configured_with: dict[str, Any] = {}
        self.events = TrainingEvents(args, TrainerState(), CallbackHandler([], None, processing_class, None, None))
        self.telemetry = Telemetry(self.events)
        # Lambdas, because a method may be replaced on the Trainer later.
        self.publisher = HubPublisher(
            self.events,
            self.save_as_part,
            lambda **given: trainer.init_hf_repo(**given),
            lambda **given: trainer.create_model_card(**given),
        )
        self.trials = TrialRunner(self.events, self.use_arguments, self.refresh, self.release)
        self.start_process()

    def start_process(self) -> None:
        """Create the components of this process; again after the Trainer was copied to another process."""
        self.device = self.args.device  # cached, because it searches for GPUs
        self.memory_tracker = MemoryTracker(self.device, enabled=not self.args.skip_memory_metrics)
        self.engines = Engines(self.device, lambda: self.args, lambda: self.trainer.is_in_train)
        self.use_model(nn.Module())

    # -- components that are made, and whose modules are loaded, when something is trained, evaluated or packed --------

    @cached_property
    def setup(self) -> RunSetup:
        """Sets up trainings."""
        from ds_trainer.training.run_setup import RunSetup

        return RunSetup(self)

    @cached_property
    def estimator(self) -> RunEstimator:
        """Predicts trainings."""
        from ds_trainer.training.planning.run_estimator import RunEstimator

        return RunEstimator()

    @cached_property
    def evaluator(self) -> Evaluator:
        """Computes the batches of evaluations."""
        from ds_trainer.training.evaluation.evaluator import Evaluator

        return Evaluator(self)

    @cached_property
    def packing(self) -> Packing:
        """Packs the samples of the datasets."""
        from ds_trainer.training.loop.packing import Packing

        return Packing(self)

    def copy_for(self, trainer: TrainerProtocol) -> Assembly:
        """The machinery of a shallow copy of the Trainer: the same objects, with the methods of the copy."""
        other = copy.copy(self)
        other.trainer = trainer
        for component in ("setup", "evaluator", "packing"):
            vars(other).pop(component, None)
        return other

    def save_as_part(self, directory: str | None = None) -> None:
        """``save_model`` as part of a checkpoint or a push."""
        save = self.trainer.save_model
        save(directory, **dict.fromkeys(accepted_arguments(save, {"_internal_call"}), True))

    # -- what follows from the arguments ------------------------------------------------------------------------------

    @property
    def args(self) -> TrainingArguments:
        """The training arguments; during a trial, those of the trial."""
        return self.events.args

    @property
    def output_dir(self) -> Path:
        """The output directory of the run."""
        return Path(str(self.args.output_dir))

    @property
    def batch_plan(self) -> BatchPlan:
        """Batch arithmetic of training."""
        return batch_plan_of(self.args, self.layout)

    @property
    def train_batch_size(self) -> int:
        """Samples of a micro-batch of one replica."""
        return replica_batch_size(self.args, "per_device_train_batch_size", self.layout.dp)

    @property
    def groups(self) -> ParallelGroups:
        """The process groups of the layout. Collective at the first call; needs a process group."""
        return parallel_groups(self.layout)

    @property
    def deepspeed(self) -> Any:
        """The engine of DeepSpeed; None before the first training."""
        engine = self.engines.training_or_none
        return None if engine is None else engine.deepspeed

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of this rank in the current step; 1 before a training."""
        return 1 if self.micro_batches is None else self.micro_batches.accumulation

    @accumulation.setter
    def accumulation(self, value: int) -> None:
        if self.micro_batches is not None:  # each step sets it
            self.micro_batches.accumulation = value

    @property
    def optimizer_cls_and_kwargs(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
        """The argument of this name of the constructor."""
        return None if self.optimizer_class is None else self.optimizer_class[:2]

    @optimizer_cls_and_kwargs.setter
    def optimizer_cls_and_kwargs(self, value: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None) -> None:
        origin = "" if value is None else f"optimizer_cls_and_kwargs=({value[0].__name__}, ...) passed to the Trainer"
        self.optimizer_class = value and (*value, origin)
        self._configured_with = {}  # the next training configures again

    @property
    def saved_processing_class(self) -> Any:
        """What is saved beside the weights: ``processing_class``, else the tokenizer of the collator, or None."""
        trainer = self.trainer
        given = trainer.processing_class
        return getattr(trainer.data_collator, "tokenizer", None) if given is None else given

    @property
    def reads_logits(self) -> bool:
        """Whether code other than the loss of the model may read the logits of a training step."""
        user = self.trainer.compute_loss_func is not None or bool({"compute_loss", "training_step"} & self.overridden)
        return user or self.trainer.label_smoother is not None

    # -- configuration ------------------------------------------------------------------------------------------------

    def configure(self) -> None:
        """Derive the configuration from arguments, model and subclass.

        Raises:
            ConfigError: the run cannot work; lists all problems.
        """
        trainer = self.trainer
        if self.args.parallelism is not None:
            from ds_trainer.training.planning.automatic_parallelism import planned_arguments

            self.events.args = planned_arguments(self.inputs(), type(trainer), self.estimator)
        derived = configure(self.inputs())
        self.layout, self.compiled, self.unsharded = derived.layout, derived.config, derived.unsharded
        trainer.label_names, trainer.label_smoother = derived.label_names, derived.smoother
        trainer.create_accelerator_and_postprocess()
        self.losses = LossComputation(
            rule=derived.rule,
            loss_function=trainer.compute_loss_func,
            smoother=trainer.label_smoother,
            label_names=trainer.label_names,
            sharder=derived.sharder,
            layout=self.layout,
            device=self.device,
            overlap_count=trainer.compute_loss_func is None and USE_THE_COUNT.isdisjoint(self.overridden),
            check=batch_check(self.overridden, self.layout),
            chunked=chunked_loss_of(self.args, self.compiled),
            sources=SourceLosses(self.args, self.device),
            packed=packs(self.args) and not compiles(self.args, self.compiled),
        )
        self._declare_loss()
        self.eval_loaders = {}
        self._configured_with = dict(vars(self.args))

    def _declare_loss(self) -> None:
        """Let the loss rule follow ``loss_is_scaled_for_ga``, if a subclass has set it."""
        if self.trainer.loss_is_scaled_for_ga is not None:
            self.losses.rule.declare(self.trainer.loss_is_scaled_for_ga, self.layout.dp)

    def changed_methods(self) -> frozenset[str]:
        """Names of methods that a subclass overrides, and of all that was set on the Trainer."""
        return self.overridden | vars(self.trainer).keys()

    def step_methods(self) -> StepMethods:
        """The methods of a step, including those that a subclass overrides or that were replaced on the Trainer."""
        from ds_trainer.training.loop.step import StepMethods

        copies = self.engines.copies
        return StepMethods.of(self.trainer, self.changed_methods(), copies.begin if copies.ahead else None)

    def inputs(self) -> TrainerInputs:
        """The current values of the constructor arguments."""
        return TrainerInputs.of(self.trainer, self.optimizer_class, self.overridden)

    def refresh(self) -> None:
        """Configure again if the user has changed arguments since the last time."""
        if dict(vars(self.args)) != self._configured_with:
            self.args.complete()
            self.start_fresh()
            self.configure()

    def use_arguments(self, args: TrainingArguments) -> None:
        """Use other arguments, with a new model."""
        self.release()
        self.events.args = args
        configure_process(args)
        self.use_new_model()
        self.configure()
        self.events.handler.model = self.trainer.model
        self.trials.reset_callbacks()

    def resize_micro_batch(self, size: int, accumulation: int) -> TrainingArguments:
        """Use micro-batches of ``size`` samples: change a copy of the arguments, and compile it again."""
        args = copy.copy(self.args)
        args.per_device_train_batch_size, args.gradient_accumulation_steps = size, accumulation
        self.events.args = args
        self.compiled = compile_run(self.inputs(), self.layout)
        self._configured_with = dict(vars(args))
        return args

    def fingerprint(self, plan: RunPlan) -> dict[str, Any]:
        """The compatibility fingerprint, which is compared when a run resumes."""
        from ds_trainer.training.resume.compatibility import compatibility_of

        optimizer, schedule = self.user_optimizers
        own_schedule = schedule is not None or "create_scheduler" in self.overridden
        cls = (self.optimizer_class or [None])[0] if optimizer is None else type(optimizer)
        about = self.args, self.batch_plan, self.compiled, self.trainer.train_dataset, plan.max_steps
        return compatibility_of(*about, own_schedule, cls)

    # -- model and engine ---------------------------------------------------------------------------------------------

    def module_of(self, given: Any) -> nn.Module:
        """The module for ``model`` or the result of ``model_init``, with the adapters of ``peft_config``."""
        self.engines.load_report = None
        model: nn.Module = resolve_model(given, self.args, self.peft_config)
        disable_cpu_repacking(model)
        return model

    def use_model(self, model: nn.Module) -> None:
        """Use ``model``, which has no engine yet."""
        if "estimator" in vars(self):
            self.estimator.release()
        self.trainer.model = self.trainer.model_wrapped = model

    def use_new_model(self) -> None:
        """Use a new model, and the optimizer and schedule of the user, if any."""
        use_optimizers(self.trainer, *self.user_optimizers)
        if self.trainer.model_init is not None:
            self.use_model(nn.Module())  # free the memory of the old model first
            trial = self.trials.trial
            self.use_model(self.trainer.call_model_init(None if trial is None else trial.source))
        self.trainer.model_wrapped = self.trainer.model

    def start_fresh(self) -> None:
        """Start a training with the initial seed and, if there is a ``model_init``, a new model."""
        set_seed(self.args.seed)
        trained = self.engines.trained
        self.engines.close()
        if trained:
            self.use_new_model()

    def release(self) -> None:
        """Drop all references to engine, model and process groups. Call :meth:`use_new_model` next."""
        self.engines.close()
        self.telemetry.release()
        handler = self.events.handler
        handler.model = handler.optimizer = handler.lr_scheduler = None
        handler.train_dataloader = handler.eval_dataloader = None
        use_optimizers(self.trainer, None, None)
        self.group_parameters = self.checkpointer = None
        self.micro_batches = None
        self.use_model(nn.Module())  # hooks on the model keep the engine alive
        self.trainer.label_smoother = None
        self.losses.release()
        free_memory(self.device)

    def parameter_groups(self, model: nn.Module | None = None) -> list[dict[str, Any]]:
        """Trainable parameters with and without weight decay."""
        trainer = self.trainer
        model = trainer.model if model is None else model
        named = trainer.get_decay_parameter_names(model)
        return separate_experts(parameter_groups(model, named, self.args.weight_decay))

    def build_engine(self, num_training_steps: int) -> None:
        """Build optimizer, schedule and engine, in this order: the engine wraps the results of overridable methods."""
        from ds_trainer.training.loop.step import MicroBatchRunner

        trainer = self.trainer
        model = trainer.model
        note_origin(model)
        adapt_model(model, self.args, self.compiled, trainer.processing_class)
        divide_model(model, self.layout, self.layout.cp * self.layout.sp > 1)
        trainer.create_optimizer_and_scheduler(num_training_steps)
        check_optimizer(trainer, self.compiled, self.layout)
        move_grokadamw_state_to_optimizer_state(trainer.optimizer)
        separate_experts(getattr(trainer.optimizer, "param_groups", []), trainer.lr_scheduler)  # those of a script
        optimizer = self.parameter_groups() if trainer.optimizer is None else trainer.optimizer
        self.group_parameters = parameters_of_groups(optimizer)
        engine = self.engines.build(model, optimizer, self.args, self.compiled, self.layout, self.reads_logits)
        schedule = trainer.lr_scheduler or engine.deepspeed_schedule
        use_optimizers(trainer, engine.basic_optimizer, schedule)
        if schedule is None:
            use_optimizers(trainer, trainer.optimizer, trainer.create_scheduler(num_training_steps, trainer.optimizer))
        trainer.model_wrapped = engine.deepspeed
        trainer.model_wrapped.train()
        self._declare_loss()
        if packs(self.args) and (self.layout.ep > 1 or "gate_bias_rate" in self.args.optimizer_arguments(own=True)):
            self.losses.rows = self.packing.packed_format()
        self.micro_batches = MicroBatchRunner(self.step_methods(), self.losses, engine, trainer.accelerator, self.args)
        handler = self.events.handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        if trainer.is_world_process_zero():
            write_compiled(self.output_dir, self.compiled, self.args)
