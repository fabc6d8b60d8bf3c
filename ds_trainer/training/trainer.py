"""``Trainer``: the public class. Its ``train`` method tells the whole story: plan, compile, build, loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.defaults import DefaultFlowCallback, PrinterCallback, ProgressCallback
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.records import RecordsCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.checkpoint.manager import STATE_FILE, CheckpointManager, find_checkpoint
from ds_trainer.checkpoint.weights import save_pretrained_parts, save_weights
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.compiler import compile_config
from ds_trainer.data.collators import default_data_collator
from ds_trainer.data.columns import drop_unused_columns
from ds_trainer.data.loader import FillerBatch, PlannedLoader
from ds_trainer.data.sampler import ShareSampler
from ds_trainer.engine.process_group import start_process_group
from ds_trainer.engine.ranks import resolve_ranks
from ds_trainer.engine.training_engine import TrainingEngine, check_layout
from ds_trainer.engine.weights import parse_size
from ds_trainer.optim.optimizers import build_optimizer, decay_parameter_names, parameter_groups
from ds_trainer.optim.schedules import build_schedule
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.training.eval_loop import evaluate_loss
from ds_trainer.training.header import print_header
from ds_trainer.training.hooks import accepted_arguments, is_overridden
from ds_trainer.training.loss import ItemCounter, LossRule, accepts_item_count, shifts_labels
from ds_trainer.training.model_habits import enable_gradient_checkpointing, without_cache
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.training.train_loop import TrainLoop, TrainOutput
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import write_text_atomic
from ds_trainer.utils.seeds import set_seed

_DEFAULT_LABEL_NAMES = ("labels", "label")
_DECISIONS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Trainer:
    """Trains and evaluates a model on a DeepSpeed engine.

    Args:
        model: any ``nn.Module`` that is called by keyword with a batch and returns its loss (as a scalar, as the first
            element of a tuple, or under ``"loss"``); or none, and ``model_init``.
        args: what is asked for; default: ``TrainingArguments("tmp_trainer")``.
        data_collator: makes a batch (a dict of tensors) of a list of samples; default:
            :func:`ds_trainer.data.collators.default_data_collator`.
        train_dataset: map-style dataset (``__len__`` and ``__getitem__``).
        eval_dataset: the same for evaluation, or a dict of several.
        processing_class: tokenizer or processor, saved beside the weights.
        model_init: makes the model, called at the start of each :meth:`train`.
        compute_loss_func: ``f(outputs, labels, num_items_in_batch=...)`` returning the summed loss over that number.
        callbacks: classes or instances, added to the default ones.
        optimizers: optimizer and schedule to use instead of those that ``args`` describe.

    Raises:
        ConfigError: what is asked for cannot run; raised before any process group exists.

    Hooks to override in a subclass: ``compute_loss``, ``training_step``, ``get_batch_samples``, ``create_optimizer``,
    ``create_scheduler``, ``get_decay_parameter_names``, ``get_train_dataloader``, ``get_eval_dataloader``, ``log``.

    Source of names and meanings: transformers 5, ``transformers.Trainer``.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
    ) -> None:
        if (model is None) == (model_init is None):
            raise ConfigError("Give either a model or a model_init that makes one, and not both.")
        self.args = args if args is not None else TrainingArguments("tmp_trainer")
        set_seed(self.args.seed)
        self.model_init = model_init
        self.model: nn.Module = model if model is not None else model_init()  # type: ignore[misc]
        self.model_wrapped: nn.Module = self.model
        self.data_collator = data_collator or default_data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.compute_loss_func = compute_loss_func
        self._given_optimizer, self._given_scheduler = optimizers
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.label_names = self.args.label_names or list(_DEFAULT_LABEL_NAMES)
        self.is_in_train = False

        self.layout, self.compiled = self._compile(resolve_ranks(os.environ).world_size)
        self.loss_rule = self._loss_rule()
        self._engine: TrainingEngine | None = None
        self._compute_loss_takes = accepted_arguments(self.compute_loss, {"return_outputs", "num_items_in_batch"})
        self._training_step_takes = accepted_arguments(self.training_step, {"num_items_in_batch"})

        progress = PrinterCallback if self.args.disable_tqdm else ProgressCallback
        defaults: list[Any] = [DefaultFlowCallback, RecordsCallback, progress]
        self._decides_alone = bool(callbacks)
        self.callback_handler = CallbackHandler([*defaults, *(callbacks or ())], self.model, processing_class)
        self.state = self._new_state()
        self.control = TrainerControl()
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    # -- plan and compile: arithmetic, before anything starts ------------------------------------------------------

    def _compile(self, world_size: int) -> tuple[ParallelLayout, CompiledConfig]:
        args = self.args
        layout = ParallelLayout(
            world_size, args.tensor_parallel_size, args.context_parallel_size, args.sequence_parallel_size
        )
        check_layout(layout)
        client_optimizer = None
        if self._given_optimizer is not None:
            client_optimizer = f"optimizers=({type(self._given_optimizer).__name__}, ...) handed to the Trainer"
        elif is_overridden(self, Trainer, "create_optimizer"):
            client_optimizer = f"{type(self).__name__}.create_optimizer"
        shape = ModelShape.from_model(self.model)
        return layout, compile_config(args, layout, shape, args.device_type, client_optimizer)

    def _loss_rule(self) -> LossRule:
        if self.compute_loss_func is not None:
            normalised = True
        elif not accepts_item_count(self.compute_loss):
            normalised = False  # an overridden compute_loss that never hears of the count returns a mean
        else:
            declared = getattr(self.model, "accepts_loss_kwargs", None)
            normalised = accepts_item_count(self.model.forward) if declared is None else bool(declared)
        return LossRule(ItemCounter(self.label_names, shifts_labels(self.model)), normalised)

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the loss is a sum divided by ``num_items_in_batch``; set it to False for one that is a mean."""
        return self.loss_rule.normalised

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        self.loss_rule = LossRule(self.loss_rule.count, value)

    # -- train ----------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end of ``args``.

        Args:
            resume_from_checkpoint: path of a checkpoint, or True for the newest one in ``args.output_dir``.
            trial: accepted for the reference's signature; hyper-parameter search is not there yet.
            ignore_keys_for_eval: accepted for the reference's signature; evaluation returns the loss only.

        Returns:
            Steps done, mean training loss, metrics.

        Raises:
            ConfigError: no training data, or a checkpoint that does not fit.
        """
        if trial is not None:
            raise ConfigError("trial: hyper-parameter search is not supported yet.")
        checkpoint = find_checkpoint(resume_from_checkpoint, self._output_dir) if resume_from_checkpoint else None

        start_process_group(self.args.device_type)
        set_seed(self.args.seed)
        if self.model_init is not None and self._engine is not None:
            self.model = self.model_wrapped = self.model_init()
        loader = self.get_train_dataloader()
        plan = RunPlan.of(self.args, self._rounds_of(loader))
        self._build(plan.max_steps)
        self.state = self._new_state(plan)
        if checkpoint is not None:
            self._resume(checkpoint)
        self.callback_handler.train_dataloader = loader
        print_header(self, plan, checkpoint)

        self.is_in_train = True
        try:
            with without_cache(self.model):
                output = TrainLoop(self, plan, loader).run()
        finally:
            self.is_in_train = False
        self.save_state()
        return output

    def _build(self, num_training_steps: int) -> None:
        """Optimizer, schedule and engine, in this order: the engine wraps what the hooks make."""
        if self._engine is not None:
            self._engine.close()
        if self.args.gradient_checkpointing:
            enable_gradient_checkpointing(self.model)
        self.optimizer, self.lr_scheduler = self._given_optimizer, self._given_scheduler
        self.create_optimizer_and_scheduler(num_training_steps)
        self._engine = TrainingEngine(self.model, self.optimizer, self.compiled, self.layout)
        self.model_wrapped = self._engine.deepspeed
        self.model_wrapped.train()
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        if self.is_world_process_zero():
            write_text_atomic(self._output_dir / "ds_config.json", self.compiled.to_json() + "\n")

    def _resume(self, checkpoint: Path) -> None:
        schedule = self._checkpoints.load(checkpoint)
        self.lr_scheduler.load_state_dict(schedule)
        resumed = TrainerState.load_from_json(checkpoint / STATE_FILE)
        fresh = self.state
        self.state = resumed
        for name in ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size"):
            setattr(self.state, name, getattr(fresh, name))
        self.state.is_local_process_zero = fresh.is_local_process_zero
        self.state.is_world_process_zero = fresh.is_world_process_zero

    def _new_state(self, plan: RunPlan | None = None) -> TrainerState:
        state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        if plan is not None:
            state.max_steps, state.num_train_epochs = plan.max_steps, plan.epochs
            state.train_batch_size = self.args.per_device_train_batch_size
            state.compute_steps(self.args, plan.max_steps)
        return state

    @property
    def engine(self) -> TrainingEngine:
        """The engine; it exists from the first :meth:`train` on. Raises ConfigError before."""
        if self._engine is None:
            raise ConfigError("There is no engine yet: it is built by train().")
        return self._engine

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make what was not handed in: ``self.optimizer``, then ``self.lr_scheduler``."""
        if self.optimizer is None:
            self.optimizer = self.create_optimizer()
        if self.lr_scheduler is None:
            self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the compiled configuration, with and without weight decay; kept in ``self.optimizer``."""
        names = self.get_decay_parameter_names(self.model)
        self.optimizer = build_optimizer(self.compiled, parameter_groups(self.model, names, self.args.weight_decay))
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The learning-rate schedule over ``num_training_steps`` optimizer steps; kept in ``self.lr_scheduler``."""
        self.lr_scheduler = build_schedule(
            self.args.lr_scheduler_type,
            self.optimizer if optimizer is None else optimizer,
            self.args.get_warmup_steps(num_training_steps),
            num_training_steps,
            self.args.lr_scheduler_kwargs,
        )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to: all but biases and norms."""
        return decay_parameter_names(model)

    # -- data -----------------------------------------------------------------------------------------------------

    @property
    def batch_plan(self) -> BatchPlan:
        """Batch arithmetic of training."""
        args = self.args
        return BatchPlan(
            self.layout, args.per_device_train_batch_size, args.gradient_accumulation_steps, args.dataloader_drop_last
        )

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Samples of one optimizer step over all ranks: micro batch x accumulation x data-parallel replicas."""
        return self.batch_plan.step_size

    def get_train_dataloader(self) -> Any:
        """Micro-batches of this replica: the order follows from seed and epoch, the plan decides who holds what.

        Raises:
            ConfigError: there is no training data.
        """
        if self.train_dataset is None:
            raise ConfigError("train() needs a train_dataset: pass one to the Trainer.")
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return self._loader(self.train_dataset, "train_dataset", self.batch_plan, seed, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Micro-batches of this replica for evaluation, in the dataset's order.

        Args:
            eval_dataset: a dataset, or the name of one in a dict of them; default: the one handed to the Trainer.

        Raises:
            ConfigError: there is no evaluation data.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ConfigError("evaluate() needs an eval_dataset: pass one to the Trainer or to evaluate().")
        plan = BatchPlan(self.layout, self.args.per_device_eval_batch_size)
        return self._loader(dataset, "eval_dataset", plan, seed=0, shuffle=False)

    def _loader(self, dataset: Any, name: str, plan: BatchPlan, seed: int, shuffle: bool) -> PlannedLoader:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(f"{name}: a {type(dataset).__name__} has no length or no items; map-style data is needed.")
        if plan.rounds(len(dataset)) == 0:
            raise ConfigError(f"{name} is empty: {len(dataset)} samples, drop_last={plan.drop_last}.")
        if self.args.remove_unused_columns:
            dataset = drop_unused_columns(dataset, self.model, self.label_names)
        dp_rank = self.layout.coordinates(distributed.rank()).dp
        pin = self.args.dataloader_pin_memory and self.args.device_type == "cuda"
        sampler = ShareSampler(plan, len(dataset), dp_rank, seed, shuffle)
        return PlannedLoader(dataset, sampler, self.data_collator, self.args.dataloader_num_workers, pin)

    def _rounds_of(self, loader: Any) -> int:
        """Micro-batches of an epoch; the same number on all ranks."""
        rounds = distributed.gather_objects(len(loader) if hasattr(loader, "__len__") else None)
        if None in rounds or len(set(rounds)) > 1:
            raise ConfigError(
                f"get_train_dataloader: the loaders' lengths over the ranks are {rounds}; all must be known and equal."
            )
        return int(rounds[0])

    # -- one micro-batch ------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor]:
        """Fetch the micro-batches of one optimizer step and count the items of the global batch.

        Returns:
            The batches, and the number of items in all of them on all ranks: a float32 scalar on ``device``, at
            least 1. One all-reduce.
        """
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        counts = [self.loss_rule.count(self._checked_batch(batch)) for batch in batches]
        items = torch.stack(counts).sum().to(device) if counts else torch.zeros((), dtype=torch.int64, device=device)
        distributed.all_reduce_sum(items)
        return batches, items.clamp(min=1).to(torch.float32)

    @staticmethod
    def _checked_batch(batch: Any) -> Mapping[str, Any]:
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"A batch is a {type(batch).__name__}, but models are called by keyword: let the data_collator return a "
                "dict like {'input_ids': ..., 'labels': ...}."
            )
        return batch

    def call_training_step(self, inputs: Any, items: torch.Tensor) -> torch.Tensor:
        """:meth:`training_step` with the arguments that it takes."""
        keywords = {"num_items_in_batch": items} if self._training_step_takes else {}
        self._items_of_step = items
        return self.training_step(self.model_wrapped, inputs, **keywords)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward pass of one micro-batch.

        Args:
            model: the engine.
            inputs: one micro-batch.
            num_items_in_batch: items of the global batch.

        Returns:
            The micro-batch's share of the global batch's mean loss, detached: summed over micro-batches and ranks it
            is that mean.
        """
        items = self._items_of_step if num_items_in_batch is None else num_items_in_batch
        rule = self.loss_rule
        own = None if rule.verified and rule.normalised else rule.count(inputs).to(items.device)
        filler = isinstance(inputs, FillerBatch)
        inputs = self._prepare_inputs(inputs)
        if rule.verified:
            loss = self.loss_of(model, inputs, items)
        else:
            items = items.clone().requires_grad_()
            loss = self.loss_of(model, dict(inputs), items)
            rule.verify(loss, items, lambda n: self._loss_without_graph(model, dict(inputs), n))
            items = items.detach()
        share = rule.contribution(loss, own, items)
        if filler:
            share = share * 0.0
        self.engine.backward(share)
        return share.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss of one micro-batch, and the model's outputs where ``return_outputs``.

        Override it for a loss of your own. Either return the *sum* over items divided by ``num_items_in_batch``, or
        leave that argument alone and return the *mean* over the micro-batch's items: both give the exact gradient
        (:mod:`ds_trainer.training.loss`).

        Raises:
            ConfigError: the model returned no loss.
        """
        labels = None
        if self.compute_loss_func is not None:
            name = next((name for name in self.label_names if name in inputs), None)
            labels = inputs.pop(name) if name is not None else None
            outputs = model(**inputs)
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        else:
            keywords = {"num_items_in_batch": num_items_in_batch} if self.loss_rule.normalised else {}
            outputs = model(**inputs, **keywords)
            loss = _loss_in(outputs, model, inputs)
        return (loss, outputs) if return_outputs else loss

    def loss_of(self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor) -> torch.Tensor:
        """:meth:`compute_loss` with the arguments that it takes."""
        keywords = {"num_items_in_batch": items} if "num_items_in_batch" in self._compute_loss_takes else {}
        return self.compute_loss(model, inputs, **keywords)

    def _loss_without_graph(self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            loss = self.loss_of(model, inputs, items)
        model.train()
        return loss

    def _prepare_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The batch on this rank's device."""
        device = self.args.device
        return {key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}

    # -- evaluate, log, save --------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss per item over a dataset, exact and equal for every layout.

        Args:
            eval_dataset: a dataset, a dict of them (evaluated one after the other, names in the metric keys), or the
                name of one; default: the Trainer's.
            ignore_keys: accepted for the reference's signature; only the loss is computed.
            metric_key_prefix: first part of the metric names.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics.update(self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        start_process_group(self.args.device_type)
        loader = self.get_eval_dataloader(dataset)
        self.callback_handler.eval_dataloader = loader
        if self._engine is None:
            self.model.to(self.args.device)
        with without_cache(self.model):
            result = evaluate_loss(self, self.model_wrapped, loader)
        values = {
            "loss": result.loss,
            "runtime": result.seconds,
            "samples_per_second": result.samples / result.seconds,
            "items": float(result.items),
        }
        logs = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        self.log(logs)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
        return {**logs, "epoch": float(self.state.epoch or 0.0)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record ``logs`` in the history and hand them to the callbacks.

        Args:
            logs: name to value.
            start_time: accepted for the reference's signature.
        """
        entry = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, entry)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights as safetensors with configuration and tokenizer, for ``from_pretrained``. Collective."""
        directory = Path(output_dir) if output_dir is not None else self._output_dir
        if self.is_world_process_zero():
            save_pretrained_parts(self.model, self.processing_class, directory)
        save_weights(self.model, directory, parse_size(self.args.max_shard_size))

    def save_checkpoint(self) -> Path:
        """Write everything that resuming needs to ``checkpoint-<global_step>``. Collective."""
        text = self.state.to_json()
        return self._checkpoints.save(self.state.global_step, text, self.lr_scheduler.state_dict())

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to the output directory (main process)."""
        if self.is_world_process_zero():
            self.state.save_to_json(self._output_dir / STATE_FILE)

    @property
    def _output_dir(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def _checkpoints(self) -> CheckpointManager:
        return CheckpointManager(self._output_dir, self.engine, self.args.save_total_limit)

    # -- callbacks and ranks --------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback (class or instance)."""
        self._decides_alone = True
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback (instance, or first of a class) and return it; None where there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback (instance, or first of a class)."""
        self.callback_handler.remove_callback(callback)

    def agree_on_control(self) -> None:
        """Make one rank's decision everybody's, so that no rank enters a collective alone.

        The default callbacks decide by step numbers, alike on all ranks; only others can differ, and only then the
        ranks talk.
        """
        if self._decides_alone and self.layout.world_size > 1:
            votes = torch.tensor([int(getattr(self.control, name)) for name in _DECISIONS])
            agreed = distributed.any_of(votes)
            for name, vote in zip(_DECISIONS, agreed, strict=True):
                setattr(self.control, name, bool(vote))

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of the whole job."""
        return self.args.process_index == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its machine."""
        return self.args.local_process_index == 0


def _loss_in(outputs: Any, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss among a model's outputs: under ``"loss"``, the first element, or the output itself."""
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)):
        loss = outputs[0]
    else:
        loss = getattr(outputs, "loss", outputs)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        what = list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        core = getattr(model, "module", model)
        raise ConfigError(
            f"{type(core).__name__} returned no scalar loss for a batch of {', '.join(inputs)} (it returned {what}). Give "
            "it the labels it needs, pass a compute_loss_func, or override compute_loss."
        )
    return loss
