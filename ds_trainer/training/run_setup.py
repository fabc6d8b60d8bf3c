"""``RunSetup``: what a training needs before its first step: its checks, its context, its plan, its loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.arguments.enums import SaveStrategy
from ds_trainer.arguments.redefined import packs
from ds_trainer.checkpoint.background.background_save import finish_before_sigterm
from ds_trainer.data.columns import base_model
from ds_trainer.engine.weights import full_numel
from ds_trainer.engine.written_weights import follow_script
from ds_trainer.engine.zero3.shard_access import watch_released
from ds_trainer.monitor.doctor.gradients import self_test_once
from ds_trainer.monitor.doctor.startup_checks import check_machine, check_ranks
from ds_trainer.monitor.memory_tracker import Stage
from ds_trainer.monitor.throughput import ThroughputMeter
from ds_trainer.training.loading.model_argument import defer_to_checkpoint
from ds_trainer.training.loop.batches import check_dataset, check_names
from ds_trainer.training.loop.first_loss_check import check_first_loss
from ds_trainer.training.loop.first_steps import FirstSteps
from ds_trainer.training.loop.loss_window import LossWindow
from ds_trainer.training.loop.packed_data import summary_of
from ds_trainer.training.loop.run_plan import RunPlan
from ds_trainer.training.loop.sharded_loading import cut_for_ranks
from ds_trainer.training.loop.step import StepRunner
from ds_trainer.training.loop.token_counter import peak_of
from ds_trainer.training.loop.training_run import TrainingRun
from ds_trainer.training.model.gradient_checkpointing import gradient_checkpointing_problems
from ds_trainer.training.out_of_memory import Remedy, explained_out_of_memory, startup_remedies, training_remedies
from ds_trainer.training.planning.run_estimator import RunEstimate, peak_memory
from ds_trainer.training.resume.checkpointer import Checkpointer
from ds_trainer.training.resume.compatibility import Changes
from ds_trainer.training.resume.output_directory import OutputDirectory, running_model
from ds_trainer.training.resume.resumption import Resumption
from ds_trainer.training.startup.batch_size_search import find_batch_size, rehearse_first_step
from ds_trainer.training.startup.compilers import check_compilers
from ds_trainer.training.startup.constructor_checks import replica_problems
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.training.startup.run_header import print_header
from ds_trainer.training.stopping.stop_controller import StopController
from ds_trainer.training.train_loop import TrainLoop
from ds_trainer.utils import distributed
from ds_trainer.utils.devices import free_memory
from ds_trainer.utils.errors import ConfigError, Problems
from ds_trainer.utils.host_votes import host_votes
from ds_trainer.utils.undisturbed import unchanged
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from ds_trainer.checkpoint.converters.transformers_reader import RunningModel
    from ds_trainer.training.assembly import Assembly

_LIBRARIES = {"torch", "transformers", "peft", "deepspeed", "ds_trainer"}
_BYTES_OF_CHECKPOINT = 12  # for each trained number: a float32 master and Adam's two; the weights come on top


class RunSetup:
    """Sets up the trainings of a Trainer; ``Trainer.train`` calls its methods in the order of this file.

    Args:
        assembly: the components of the Trainer.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._stage: Stage

    # -- before anything is built -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the Trainer can train.

        Raises:
            ConfigError: lists all problems.
        """
        assembly, dataset = self._assembly, self._assembly.trainer.train_dataset
        args, problems = assembly.args, Problems()
        problems.extend(assembly.unsharded)
        problems.extend(replica_problems(type(assembly.trainer), assembly.layout))
        if args.memory_check and not args.auto_find_batch_size and (estimate := self.estimate()):
            problems.extend(estimate.problems())
        if "get_train_dataloader" not in assembly.overridden:  # else the dataset may be of any kind
            if dataset is not None:
                with problems.collecting():
                    check_dataset(dataset, "train_dataset", assembly.batch_plan)
            else:
                problems.add("train() needs a train_dataset: pass one to the Trainer.")
        problems.raise_if_any()

    def estimate(self) -> RunEstimate | None:
        """What the planner predicts for a training with the current arguments; None if it cannot."""
        assembly = self._assembly
        if assembly.engines.current is None:
            assembly.estimator.release()  # parameters may have been frozen since the last time
        return assembly.estimator.predict(assembly.inputs(), assembly.compiled, assembly.layout)

    def _choose_loss(self) -> None:
        """Let the loss have one pass where all ranks have room for it: some share the vocabulary. Collective."""
        estimate = self.estimate()
        no_room = self._assembly.device.type != "cpu" and not (estimate and estimate.candidate.one_pass)
        self._assembly.losses.chunked.one_pass = not any(distributed.agree(torch.tensor([int(no_room)])))

    def output_directory(self, resume: str | bool | None) -> OutputDirectory:
        """The output directory; see :class:`OutputDirectory`."""
        return OutputDirectory(self._assembly.args, resume)

    @contextmanager
    def entered(self, directory: OutputDirectory) -> Iterator[tuple[StopController, ExitStack]]:
        """Context of a training that releases its resources, however it ends. Collective."""
        assembly, args = self._assembly, self._assembly.args
        saves = args.enable_jit_checkpoint or (args.save_strategy != SaveStrategy.NO and not args.save_only_model)
        with ExitStack() as outer:
            self._stage = outer.enter_context(assembly.memory_tracker.stage("train"))
            assembly.trainer.is_in_train = True
            outer.callback(setattr, assembly.trainer, "is_in_train", False)
            outer.callback(directory.release)
            outer.enter_context(assembly.telemetry.recorder.recorded(lambda: directory.is_ours))
            join_ranks(args)
            votes = host_votes(assembly.groups.world_host) if distributed.world_size() > 1 else None
            limits = args.time_limit_margin, votes, directory.resumes_automatically
            stop = StopController(assembly.output_dir, saves, not args.save_only_model, *limits)
            outer.enter_context(stop)
            if not saves:
                outer.enter_context(finish_before_sigterm(lambda: self._end_by_sigterm(stop)))
            with ExitStack() as parts, self._explained_out_of_memory():
                yield stop, parts

    def _end_by_sigterm(self, stop: StopController) -> None:
        """Finish what is in progress before SIGTERM ends the process."""
        try:
            stop.before_exit()
        finally:
            self._assembly.telemetry.recorder.end(None, "killed by SIGTERM")

    def _explained_out_of_memory(self) -> AbstractContextManager[None]:
        """Context in which an out-of-memory error ends with what to change."""
        assembly = self._assembly

        def when() -> str:
            if assembly.engines.training_or_none is None:
                return "while the engine was built"
            size = assembly.args.per_device_train_batch_size
            return f"in step {assembly.events.state.global_step + 1}, with {counted(size, 'sample')} in a micro-batch"

        def remedies() -> list[Remedy]:
            if assembly.engines.training_or_none is None:
                return startup_remedies(assembly.compiled, assembly.layout)
            can_recompute = not gradient_checkpointing_problems(assembly.trainer.model, None, reentrant=False)
            return training_remedies(assembly.args, assembly.compiled, assembly.layout, can_recompute)

        return explained_out_of_memory(when, remedies, assembly.args.deepspeed)

    def check_start(self) -> None:
        """Refuse a start that cannot go well, and warn of what may not: ranks, machines, the gradient. Collective.

        Raises:
            ConfigError: ranks differ in versions, code or arguments, a compiler that the arguments need does not
                work, or the engine computes wrong gradients here.
        """
        assembly, args = self._assembly, self._assembly.args
        config, layout = assembly.compiled, assembly.layout
        if args.local_process_index == 0:
            check_machine(args, self._bytes_of_checkpoint())
        check_ranks(args, config.to_dict())
        check_compilers(args, assembly.trainer.model, config, layout)
        self_test_once(args, config, layout)

    def _bytes_of_checkpoint(self) -> int:
        args, model = self._assembly.args, self._assembly.trainer.model
        if args.save_strategy == SaveStrategy.NO:
            return 0
        weights = sum(full_numel(p) * p.element_size() for p in model.parameters())
        trained = sum(full_numel(p) for p in model.parameters() if p.requires_grad)
        return weights + (0 if args.save_only_model else _BYTES_OF_CHECKPOINT * trained)

    def describe_running_model(self) -> RunningModel:
        """Parameter groups by name, for checkpoints whose optimizer states have numbers.

        Raises:
            ConfigError: ``create_optimizer`` is overridden, so the groups are unknown.
        """
        assembly = self._assembly
        if assembly.user_optimizers[0] is None and "create_optimizer" in assembly.overridden:
            raise ConfigError(
                f"{type(assembly.trainer).__name__} overrides create_optimizer, so the numbered optimizer states of a "
                "checkpoint of transformers.Trainer cannot be mapped to parameters. Pass the optimizer with "
                "optimizers=(optimizer, None), or start from the weights only (start_from_weights)."
            )
        cls = None if assembly.optimizer_class is None else assembly.optimizer_class[0]
        groups, given = assembly.parameter_groups(), assembly.user_optimizers
        return running_model(assembly.trainer.model, assembly.args, assembly.compiled, groups, given, cls)

    def find_batch_size(self) -> None:
        """Find the largest micro-batch that fits (``auto_find_batch_size``). Collective."""
        assembly, trainer = self._assembly, self._assembly.trainer
        size = trainer.get_total_train_batch_size()
        find_batch_size(assembly.args, size, trainer.optimizer, self.rehearse, assembly.resize_micro_batch)

    def rehearse(self) -> str | None:
        """Rehearse the first step. Returns the out-of-memory message of this rank, or None. Closes the engine."""
        assembly = self._assembly
        self._choose_loss()
        loader = assembly.trainer.get_train_dataloader()
        assembly.build_engine(1)
        assert assembly.micro_batches is not None
        accumulation, engine = assembly.args.gradient_accumulation_steps, assembly.engines.training
        try:
            return rehearse_first_step(
                loader, accumulation, engine, assembly.micro_batches, assembly.losses, assembly.device
            )
        finally:
            assembly.start_fresh()
            free_memory(assembly.device)

    # -- the run ------------------------------------------------------------------------------------------------------

    def plan(self, loader: Any, checkpoint: Path | None) -> tuple[RunPlan, Resumption | None, Changes]:
        """The plan of the run, with the description of the run in the checkpoint. Collective.

        Raises:
            ConfigError: the optimizer has changed, or with ``strict_resume`` any argument of the compatibility
                fingerprint, and ``allow_changed_on_resume`` does not allow it.
        """
        assembly, args = self._assembly, self._assembly.args
        values = assembly.trainer.set_initial_training_values(args, loader)
        plan = RunPlan.of_values(values, args.gradient_accumulation_steps)
        if checkpoint is None:
            return plan, None, Changes({})
        defer_to_checkpoint(assembly.trainer.model, checkpoint)
        resumption = Resumption.of(checkpoint)
        plan = resumption.plan(args, assembly.batch_plan, plan, loader, assembly.fingerprint(plan))
        return plan, resumption, resumption.changes(assembly.fingerprint(plan), args)

    def training_run(self, plan: RunPlan, loader: Any) -> TrainingRun:
        """The objects that the components of this training share."""
        assembly, trainer = self._assembly, self._assembly.trainer
        assembly.events.handler.train_dataloader = loader

        def final_metrics() -> dict[str, Any]:
            report = assembly.engines.load_report
            packed = summary_of(loader)
            seconds, peak = assembly.telemetry.step_seconds(), peak_memory(assembly.device)
            shares = (row.get("expert_busiest_share") for row in reversed(trainer.state.log_history))
            busiest = next((share for share in shares if share is not None), None)
            return {
                **({} if report is None else report.metrics()),
                **({} if packed is None else packed.metrics()),
                **assembly.estimator.metrics(seconds, peak, busiest),
                **self._stage.end(),
            }

        return TrainingRun(
            events=assembly.events,
            config=assembly.compiled,
            batch_plan=assembly.batch_plan,
            plan=plan,
            model=trainer.model,
            engine=assembly.engines.training,
            optimizer=trainer.optimizer,
            lr_scheduler=trainer.lr_scheduler,
            loader=loader,
            processing_class=assembly.saved_processing_class,
            device=assembly.device,
            fingerprint=assembly.fingerprint(plan),
            log=trainer.log,
            final_metrics=final_metrics,
            losses=assembly.losses,
        )

    def make_checkpointer(self, run: TrainingRun, directory: OutputDirectory, stop: StopController) -> Checkpointer:
        """Create the checkpointer of a new training."""
        assembly = self._assembly
        own = bool({"save_model", "_save"} & assembly.overridden)
        made = Checkpointer(run, directory, stop, assembly.publisher, assembly.save_as_part, own)
        assembly.checkpointer = made
        return made

    def print_header(self, run: TrainingRun, checkpoint: Path | None) -> None:
        """Print the header, with what the planner predicts, and begin the record of the run."""
        assembly, trainer, estimator = self._assembly, self._assembly.trainer, self._assembly.estimator
        self._choose_loss()
        data = trainer.train_dataset, trainer.eval_dataset
        about = estimator.text(), estimator.prediction()
        print_header(run, assembly.engines, assembly.telemetry, *data, checkpoint, *about)

    def train_loop(
        self, run: TrainingRun, checkpointer: Checkpointer, stop: StopController, ignore_keys: list[str] | None
    ) -> TrainLoop:
        """The loop of a training, after a possible restore."""
        assembly, trainer, args = self._assembly, self._assembly.trainer, self._assembly.args
        assert assembly.micro_batches is not None
        engine, meter, losses, methods = run.engine, ThroughputMeter(), assembly.losses, assembly.step_methods()
        own = "floating_point_ops" in assembly.overridden
        of_user = own or callable(getattr(trainer.model, "floating_point_ops", None))
        counter = assembly.telemetry.count_work(
            model=trainer.model,
            meter=meter,
            layout=assembly.layout,
            peak=peak_of(assembly.compiled, assembly.device),
            padding=getattr(trainer.processing_class, "pad_token_id", None),
            flops=trainer.floating_point_ops if of_user else None,
            packed=assembly.packing.packed_format() if packs(args) else None,
        )
        # Code of a script may write weights while it trains: a callback, a method, a class of the model.
        classes = {type(module).__module__.partition(".")[0] for module in trainer.model.modules()}
        own_code = assembly.events.user_callbacks or bool(assembly.overridden) or not classes <= _LIBRARIES
        assembly.events.handler.around = follow_script(engine) if own_code else nullcontext
        functions = trainer.compute_loss_func, trainer.compute_metrics, trainer.preprocess_logits_for_metrics
        if engine.stage == 3 and (own_code or any(functions)):
            watch_released(engine.deepspeed.module)
        cut_for_ranks(run.loader, losses, counter, assembly.changed_methods(), args.auto_find_batch_size)
        health = assembly.telemetry.watch(assembly.output_dir, checkpointer.finish_before_exit)
        group = assembly.groups.seq_data_parallel if distributed.world_size() > 1 else None
        losses.loader = run.loader
        by_source = losses.sources.window = losses.sources.sums(trainer.train_dataset, group)
        window = LossWindow(assembly.device, args.logging_nan_inf_filter, group, by_source)
        recovery = None
        if args.auto_find_batch_size:
            from ds_trainer.training.loop.memory_recovery import MemoryRecovery

            recovery = MemoryRecovery.of(run, assembly.resize_micro_batch)
        step = StepRunner(
            methods=methods,
            micro_batches=assembly.micro_batches,
            losses=losses,
            engine=engine,
            events=assembly.events,
            guard=checkpointer.guard,
            health=health,
            counter=counter,
            meter=meter,
            window=window,
            optimizer=run.optimizer,
            lr_scheduler=run.lr_scheduler,
            device=assembly.device,
            check_first=self.check_first_batch,
            recovery=recovery,
            first_steps=FirstSteps.of(run, losses, methods, assembly.overridden, trainer.train_dataset),
        )
        profiler = None
        if args.profile_steps and trainer.is_world_process_zero():
            from ds_trainer.monitor.step_profiler import StepProfiler

            left = run.plan.max_steps - assembly.events.state.global_step
            known = assembly.estimator.at_best()
            profiler = StepProfiler(args.profile_steps, left, assembly.output_dir, assembly.device, *known)
            health.on_phase = profiler.phase
        return TrainLoop(
            run=run,
            step=step,
            checkpointer=checkpointer,
            stop=stop,
            health=health,
            meter=meter,
            counter=counter,
            window=window,
            evaluate=lambda stop: assembly.evaluator.evaluate_in_training(stop, ignore_keys),  # made when it is needed
            save_checkpoint=partial(trainer._save_checkpoint, trainer.model, assembly.trials.trial),
            own_flos=trainer.store_flos if "store_flos" in assembly.overridden else None,
            profiler=profiler,
        )

    # -- the first batch ----------------------------------------------------------------------------------------------

    def check_first_batch(self, batch: Any) -> None:
        """Before the first step, check a batch, and that neither sharding, tiles nor packing change the results."""
        self.check_keys(batch)
        alone = self._assembly.layout.world_size == 1
        with nullcontext() if alone else unchanged(self._assembly.trainer.model):  # what is compared is not counted
            self._compare(batch)

    def check_keys(self, batch: Any) -> None:
        """Check that the model takes the keys of a batch."""
        if self._assembly.losses.overlap_count:
            check_names(batch, self._assembly.trainer.model)

    def _compare(self, batch: Any) -> None:
        """Compare the results of a batch with those without sharding, tiles and packing. Collective."""
        assembly, trainer, losses = self._assembly, self._assembly.trainer, self._assembly.losses
        if "compute_loss" not in assembly.overridden:
            liger = bool(assembly.args.use_liger_kernel) and "forward" in vars(base_model(trainer.model))
            check_first_loss(losses, trainer.model_wrapped, batch, trainer._prepare_inputs, liger)
        if losses.sharder is not None:
            from ds_trainer.training.model.sequence_sharding.setup import check_sequence_sharding

            about = assembly.groups, trainer._prepare_inputs, packs(assembly.args)
            check_sequence_sharding(trainer.model_wrapped, losses.sharder, batch, *about)
        if packs(assembly.args):
            assembly.packing.check(trainer.model_wrapped, batch, again=True)  # the engine is new
        if assembly.layout.ep > 1:
            from ds_trainer.training.loop.expert_proof import check_experts

            check_experts(assembly, batch)
