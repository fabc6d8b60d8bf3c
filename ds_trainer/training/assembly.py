"""``Assembly``: builds the components of the Trainer: configuration, engine, run, loop."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn

from ds_trainer.arguments.redefined import packs
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.state import TrainerState
from ds_trainer.data.columns import base_model
from ds_trainer.monitor.memory_tracker import MemoryTracker, Stage
from ds_trainer.monitor.step_profiler import StepProfiler
from ds_trainer.monitor.throughput import ThroughputMeter
from ds_trainer.optim.library_optimizer_builder import move_grokadamw_state_to_optimizer_state
from ds_trainer.optim.weight_swapping import check_weight_swapping
from ds_trainer.training.engines import Engines
from ds_trainer.training.hub.publisher import HubPublisher
from ds_trainer.training.loading.weight_check import note_origin
from ds_trainer.training.loop.batches import batch_check, check_names
from ds_trainer.training.loop.first_loss_check import check_first_loss
from ds_trainer.training.loop.first_steps import FirstSteps
from ds_trainer.training.loop.loss_computation import LossComputation, LossMethod
from ds_trainer.training.loop.loss_window import LossWindow
from ds_trainer.training.loop.memory_recovery import MemoryRecovery
from ds_trainer.training.loop.packed_data import PackedData, summary_of
from ds_trainer.training.loop.run_plan import RunPlan
from ds_trainer.training.loop.sharded_loading import cut_for_ranks
from ds_trainer.training.loop.source_losses import SourceLosses
from ds_trainer.training.loop.step import MicroBatchRunner, StepMethods, StepRunner
from ds_trainer.training.loop.token_counter import peak_of
from ds_trainer.training.loop.training_run import TrainingRun
from ds_trainer.training.model.preparation import adapt_model, chunked_loss_of, compiles
from ds_trainer.training.model.sequence_sharding.attention_modules import use_sharded_attention
from ds_trainer.training.model.sequence_sharding.setup import check_sequence_sharding
from ds_trainer.training.overrides.evaluation_methods import EvaluationMethods
from ds_trainer.training.overrides.optimization import Optimization, check_optimizer
from ds_trainer.training.overrides.run_state import RunState
from ds_trainer.training.overrides.saving import Saving
from ds_trainer.training.overrides.search_methods import SearchMethods
from ds_trainer.training.planning.automatic_parallelism import planned_arguments
from ds_trainer.training.planning.run_estimate import RunEstimate
from ds_trainer.training.planning.run_estimator import RunEstimator, peak_memory
from ds_trainer.training.resume.checkpointer import Checkpointer
from ds_trainer.training.resume.compatibility import compatibility_of
from ds_trainer.training.resume.output_directory import OutputDirectory
from ds_trainer.training.resume.running_model import parameters_of_groups
from ds_trainer.training.search.trial_runner import TrialRunner
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.training.startup.batch_size_search import rehearse_first_step
from ds_trainer.training.startup.configuration import TrainerInputs, compile_run, configure
from ds_trainer.training.startup.process_setup import configure_process
from ds_trainer.training.stopping.stop_controller import StopController
from ds_trainer.training.telemetry import Telemetry
from ds_trainer.training.train_loop import TrainLoop
from ds_trainer.utils import distributed
from ds_trainer.utils.devices import free_memory
from ds_trainer.utils.files import write_text_atomic
from ds_trainer.utils.seeds import set_seed

# Methods that receive the item count of the global batch, or train with the accelerator.
_USE_THE_COUNT = frozenset({"compute_loss", "training_step", "get_batch_samples"})


class Assembly(SearchMethods, EvaluationMethods, Optimization, Saving, RunState):
    """Builds the components of a Trainer, and rebuilds them if arguments or model change."""

    unsharded: list[str]
    """Reasons against the sequence sharding that the layout requests; if there are any, training is not possible."""
    stage: Stage
    """Measures the memory of the run; does nothing without ``skip_memory_metrics=False``."""
    configured_with: dict[str, Any]
    """The arguments when :meth:`configure` was last called."""

    # -- components and model -----------------------------------------------------------------------------------------

    def make_components(self, args: TrainingArguments, processing_class: Any) -> None:
        """Create the components that live as long as the Trainer."""
        self.events = TrainingEvents(args, TrainerState(), CallbackHandler([], None, processing_class, None, None))
        self.telemetry = Telemetry(self.events)
        self.estimator = RunEstimator()
        # Lambdas, because a method may be replaced on this object later.
        self.publisher = HubPublisher(
            self.events,
            self.save_as_part,
            lambda **given: self.init_hf_repo(**given),
            lambda **given: self.create_model_card(**given),
        )
        self.trials = TrialRunner(self.events, self.use_arguments, self.refresh, self.release)
        self.packed_data = PackedData()
        self.start_process()

    def start_process(self) -> None:
        """Create the components of this process; again after the Trainer was copied to another process."""
        self.device = self.args.device  # cached, because it searches for GPUs
        self.memory_tracker = MemoryTracker(self.device, enabled=not self.args.skip_memory_metrics)
        self.engines = Engines(self.device, lambda: self.args)
        self.use_model(nn.Module())

    def make_checkpointer(self, run: TrainingRun, directory: OutputDirectory, stop: StopController) -> Checkpointer:
        """Create the checkpointer of a new training."""
        own = bool({"save_model", "_save"} & self.overridden)
        self.checkpointer = Checkpointer(run, directory, stop, self.publisher, self.save_as_part, own)
        return self.checkpointer

    # -- configuration ------------------------------------------------------------------------------------------------

    def configure(self) -> None:
        """Derive the configuration from arguments, model and subclass.

        Raises:
            ConfigError: the run cannot work; lists all problems.
        """
        if self.args.parallelism is not None:
            self.events.args = planned_arguments(self.inputs(), type(self), self.estimator)
        derived = configure(self.inputs())
        self.layout, self.compiled, self.unsharded = derived.layout, derived.config, derived.unsharded
        self.label_names, self.label_smoother = derived.label_names, derived.smoother
        self.create_accelerator_and_postprocess()
        self.losses = LossComputation(
            derived.rule,
            loss_function=self.compute_loss_func,
            smoother=self.label_smoother,
            label_names=self.label_names,
            sharder=derived.sharder,
            layout=self.layout,
            device=self.device,
            overlap_count=self.compute_loss_func is None and _USE_THE_COUNT.isdisjoint(self.overridden),
            check=batch_check(self.overridden, self.layout),
            chunked=chunked_loss_of(self.args, self.compiled),
            sources=SourceLosses(self.args, self.device),
            packed=packs(self.args) and not compiles(self.args, self.compiled),
        )
        self.declare_loss()
        self.eval_loaders = {}
        self.configured_with = dict(vars(self.args))

    def declare_loss(self) -> None:
        """Let the loss rule follow ``loss_is_scaled_for_ga``, if a subclass has set it."""
        if self.loss_is_scaled_for_ga is not None:
            self.loss_rule.declare(self.loss_is_scaled_for_ga, self.layout.dp)

    def step_methods(self) -> StepMethods:
        """The methods of a step, including those that a subclass overrides or that were replaced on this object."""
        changed = self.overridden | vars(self).keys()
        contexts = {"compute_loss_context_manager", "autocast_smart_context_manager"} & changed
        return StepMethods(
            self.get_batch_samples,
            self.training_step,
            bool(accepted_arguments(self.training_step, {"num_items_in_batch"})),
            LossMethod.of(self.compute_loss),
            self._prepare_inputs,
            self.compute_loss_context_manager if contexts else None,
            self.engines.copies.begin,
            uses_accelerator=self.compute_loss_func is not None or not _USE_THE_COUNT.isdisjoint(changed),
            own_step="training_step" in changed,
        )

    def inputs(self) -> TrainerInputs:
        """The current values of the constructor arguments."""
        return TrainerInputs(
            self.model,
            self.args,
            self.train_dataset,
            self.eval_dataset,
            self.processing_class,
            self.compute_metrics,
            self.compute_loss_func,
            self.optimizer,
            self.lr_scheduler,
            self.optimizer_class,
            self.compute_loss,
            self.overridden,
            type(self).__name__,
            self.data_collator,
        )

    def refresh(self) -> None:
        """Configure again if the user has changed arguments since the last time."""
        if dict(vars(self.args)) != self.configured_with:
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
        self.events.handler.model = self.model
        self.trials.reset_callbacks()

    def use_new_model(self) -> None:
        """Use a new model, and the optimizer and schedule of the user, if any."""
        self.use_optimizers(*self.user_optimizers)
        if self.model_init is not None:
            self.use_model(nn.Module())  # free the memory of the old model first
            trial = self.trials.trial
            self.use_model(self.call_model_init(None if trial is None else trial.source))
        self.model_wrapped = self.model

    def use_model(self, model: nn.Module) -> None:
        """Use ``model``, which has no engine yet."""
        self.estimator.release()
        self.model = self.model_wrapped = model

    def start_fresh(self) -> None:
        """Start a training with the initial seed and, if there is a ``model_init``, a new model."""
        set_seed(self.args.seed)
        trained = self.engines.training_or_none is not None
        self.engines.close()
        if trained:
            self.use_new_model()

    def release(self) -> None:
        """Drop all references to engine, model and process groups. Call :meth:`use_new_model` next."""
        self.engines.close()
        self.telemetry.release()
        self.estimator.release()
        handler = self.events.handler
        handler.model = handler.optimizer = handler.lr_scheduler = None
        handler.train_dataloader = handler.eval_dataloader = None
        self.use_optimizers(None, None)
        self.group_parameters = self.checkpointer = None
        self.micro_batches = None
        self.use_model(nn.Module())  # hooks on the model keep the engine alive
        self.label_smoother = None
        self.losses.release()
        free_memory(self.device)

    # -- a training ---------------------------------------------------------------------------------------------------

    def build_engine(self, num_training_steps: int) -> None:
        """Build optimizer, schedule and engine, in this order: the engine wraps the results of overridable methods."""
        note_origin(self.model)
        adapt_model(self.model, self.args, self.compiled, self.processing_class)
        use_sharded_attention(self.model, self.layout)
        self.create_optimizer_and_scheduler(num_training_steps)
        check_optimizer(self.optimizer, self.lr_scheduler, self.model, self.compiled, type(self).__name__)
        check_weight_swapping(self.optimizer, self.compiled.zero_stage, self.compiled.precision.dtype)
        move_grokadamw_state_to_optimizer_state(self.optimizer)
        optimizer = self.parameter_groups() if self.optimizer is None else self.optimizer
        self.group_parameters = parameters_of_groups(optimizer)
        engine = self.engines.build(self.model, optimizer, self.args, self.compiled, self.layout, self.reads_logits)
        schedule = self.lr_scheduler or engine.deepspeed_schedule
        self.use_optimizers(engine.basic_optimizer, schedule)
        if schedule is None:
            self.use_optimizers(self.optimizer, self.create_scheduler(num_training_steps, self.optimizer))
        self.model_wrapped = engine.deepspeed
        self.model_wrapped.train()
        self.declare_loss()
        self.micro_batches = MicroBatchRunner(self.step_methods(), self.losses, engine, self.accelerator, self.args)
        handler = self.events.handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        if self.is_world_process_zero():
            write_text_atomic(self.output_dir / "ds_config.json", self.compiled.to_json() + "\n")

    def training_run(self, plan: RunPlan, loader: Any) -> TrainingRun:
        """The objects that the components of this training share."""
        self.events.handler.train_dataloader = loader

        def final_metrics() -> dict[str, Any]:
            report = self.engines.load_report
            compared = self.estimator.metrics(self.telemetry.step_seconds(), peak_memory(self.device))
            packed = summary_of(loader)
            return {
                **({} if report is None else report.metrics()),
                **({} if packed is None else packed.metrics()),
                **compared,
                **self.stage.end(),
            }

        return TrainingRun(
            self.events,
            self.compiled,
            self.batch_plan,
            plan,
            self.model,
            self.engines.training,
            self.optimizer,
            self.lr_scheduler,
            loader,
            self.saved_processing_class,
            self.device,
            self.fingerprint(plan),
            self.log,
            final_metrics,
        )

    def estimate_run(self) -> RunEstimate | None:
        """What the planner predicts for a training with the current arguments; None if it cannot."""
        if self.engines.current is None:
            self.estimator.release()  # parameters may have been frozen since the last time
        return self.estimator.predict(self.inputs(), self.compiled, self.layout)

    def train_loop(
        self, run: TrainingRun, checkpointer: Checkpointer, stop: StopController, ignore_keys: list[str] | None
    ) -> TrainLoop:
        """The loop of a training, after a possible restore."""
        engine, meter = run.engine, ThroughputMeter()
        of_user = "floating_point_ops" in self.overridden or callable(getattr(self.model, "floating_point_ops", None))
        counter = self.telemetry.count_work(
            self.model,
            meter,
            self.layout,
            peak_of(self.compiled, self.device),
            getattr(self.processing_class, "pad_token_id", None),
            self.floating_point_ops if of_user else None,
        )
        cut_for_ranks(run.loader, self.losses, counter, {*self.overridden, *vars(self)}, self.args.auto_find_batch_size)
        health = self.telemetry.watch(self.output_dir, checkpointer.finish_before_exit)
        group = self.groups.seq_data_parallel if distributed.world_size() > 1 else None
        self.losses.loader = run.loader
        by_source = self.losses.sources.window = self.losses.sources.sums(self.train_dataset, group)
        window = LossWindow(self.device, self.args.logging_nan_inf_filter, group, by_source)
        step = StepRunner(
            self.step_methods(),
            self.micro_batch_runner,
            self.losses,
            engine,
            self.events,
            checkpointer.guard,
            health,
            counter,
            meter,
            window,
            run.optimizer,
            run.lr_scheduler,
            self.device,
            self.check_first_batch,
            MemoryRecovery.of(run, self.resize_micro_batch) if self.args.auto_find_batch_size else None,
            FirstSteps.of(run, self.losses, self.step_methods(), self.overridden, self.train_dataset),
        )
        evaluate = partial(self.evaluate_in_training, ignore_keys=ignore_keys)
        save = partial(self._save_checkpoint, self.model, self.trials.trial)
        profiler = None
        if self.args.profile_steps and self.is_world_process_zero():
            left = run.plan.max_steps - self.state.global_step
            profiler = StepProfiler(self.args.profile_steps, left, self.output_dir, self.device)
            health.on_phase = profiler.phase
        return TrainLoop(run, step, checkpointer, stop, health, meter, counter, window, evaluate, save, profiler)

    def check_first_batch(self, batch: Any) -> None:
        """Before the first step, check a batch, and that neither sharding, tiles nor packing change the results."""
        self.check_keys(batch)
        self.compare_first_batch(batch)

    def check_keys(self, batch: Any) -> None:
        """Check that the model takes the keys of a batch."""
        if self.losses.overlap_count:
            check_names(batch, self.model)

    def compare_first_batch(self, batch: Any) -> None:
        """Compare the results of a batch with those without sharding, tiles and packing. Collective."""
        if "compute_loss" not in self.overridden:
            liger = bool(self.args.use_liger_kernel) and "forward" in vars(base_model(self.model))
            check_first_loss(self.losses, self.model_wrapped, batch, self._prepare_inputs, liger)
        if self.sequence_sharder is not None:
            about = self.groups, self._prepare_inputs, packs(self.args)
            check_sequence_sharding(self.model_wrapped, self.sequence_sharder, batch, *about)
        if packs(self.args):
            self.packed_data.proven = False  # the engine is new
            self.check_packing(self.model_wrapped, batch)

    def fingerprint(self, plan: RunPlan) -> dict[str, Any]:
        """The compatibility fingerprint, which is compared when a run resumes."""
        given = self.has_user_schedule, self.user_optimizer_class
        return compatibility_of(self.args, self.batch_plan, self.compiled, self.train_dataset, plan.max_steps, *given)

    # -- auto_find_batch_size -----------------------------------------------------------------------------------------

    def rehearse(self) -> str | None:
        """Rehearse the first step. Returns the out-of-memory message of this rank, or None. Closes the engine."""
        loader = self.get_train_dataloader()
        self.build_engine(1)
        try:
            return rehearse_first_step(
                *(loader, self.args.gradient_accumulation_steps, self.engine, self.micro_batch_runner),
                *(self.losses, self.device),
            )
        finally:
            self.start_fresh()
            free_memory(self.device)

    def resize_micro_batch(self, size: int, accumulation: int) -> TrainingArguments:
        """Use micro-batches of ``size`` samples: change a copy of the arguments, and compile it again."""
        args = copy.copy(self.args)
        args.per_device_train_batch_size, args.gradient_accumulation_steps = size, accumulation
        self.events.args = args
        self.compiled = compile_run(self.inputs(), self.layout)
        self.configured_with = dict(vars(args))
        return args
