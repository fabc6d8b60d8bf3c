"""``Trainer``: the public class. Its ``train`` method tells the whole story: plan, compile, build, loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.defaults import DefaultFlowCallback, PrinterCallback, ProgressCallback
from ds_trainer.callbacks.integrations import reporting_callbacks
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.records import RecordsCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.checkpoint.manager import choose_checkpoint
from ds_trainer.checkpoint.protocol.directory import find_checkpoint
from ds_trainer.data.collators import collator_for
from ds_trainer.engine.training_engine import TrainingEngine, precision_of
from ds_trainer.monitor.memory_tracker import MemoryTracker
from ds_trainer.optim.library_optimizers import keep_state_where_it_is_saved
from ds_trainer.optim.swapping import check_swapping
from ds_trainer.training.batch_size_search import find_batch_size
from ds_trainer.training.batches import check_dataset
from ds_trainer.training.construction import check_construction
from ds_trainer.training.header import print_header
from ds_trainer.training.hooks.optimizer import members_of
from ds_trainer.training.hooks.search import SearchHooks
from ds_trainer.training.loading.model_argument import leave_to_checkpoint, put_on_device
from ds_trainer.training.model.compilation import compile_options
from ds_trainer.training.model.preparation import adapt_model, prepared_for_training
from ds_trainer.training.model.split_attention import use_split_attention
from ds_trainer.training.process import configure_process
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.training.signatures import is_overridden
from ds_trainer.training.start import check_start
from ds_trainer.training.train_loop import TrainLoop, TrainOutput
from ds_trainer.training.weight_check import WeightCheck, note_origin
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.files import write_text_atomic

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Trainer(SearchHooks):
    """Trains and evaluates a model on a DeepSpeed engine.

    Args:
        model: any ``nn.Module`` that is called by keyword with a batch and returns its loss (as a scalar, as the first
            element of a tuple, or under ``"loss"``); or a directory or hub name, of which each rank reads its shards
            (docs/loading.md); or a configuration of transformers, for a new model; or none, and ``model_init``.
        args: what is asked for; default: ``TrainingArguments("tmp_trainer")``.
        data_collator: makes a batch (a dict of tensors) of a list of samples; default:
            :func:`ds_trainer.data.collators.default_data_collator`, or padding where ``processing_class`` is a
            tokenizer or feature extractor.
        train_dataset: an object with ``__len__`` and ``__getitem__``, or one that can only be iterated
            (:mod:`ds_trainer.data.stream`).
        eval_dataset: the same for evaluation, or a dict of several.
        processing_class: tokenizer or processor, saved beside the weights.
        model_init: makes the model, or names it, so that every :meth:`train` starts from a new one.
        compute_loss_func: ``f(outputs, labels, num_items_in_batch=...)`` returning the summed loss over that number.
        compute_metrics: metrics of an evaluation, from its predictions and labels.
        callbacks: classes or instances, added to the default ones.
        optimizers: optimizer and schedule to use instead of those that ``args`` describe.
        optimizer_cls_and_kwargs: class and arguments of the optimizer to use instead of the one that ``args`` describe;
            made over the trainer's parameter groups.
        preprocess_logits_for_metrics: ``f(logits, labels)``, what to keep of the logits of each batch.
        peft_config: of PEFT: the model gets new adapters, and they alone are trained.

    Raises:
        ConfigError: what is asked for cannot run; raised before any process group exists.

    Attributes:
        model: the model itself, never wrapped.
        model_wrapped: the outermost module, to be called in the forward pass: the DeepSpeed engine while there is one.
        is_in_train: whether :meth:`train` is running.
        place_model_on_device: whether the model is moved to the device at once; False, since the engine does it.
        is_model_parallel: False: layers are spread by the engine, never by the model itself.
        state, control, callback_handler: what callbacks see.
        optimizer, lr_scheduler: those handed in; once training has begun, those in use.

    What a subclass may override is in ``ds_trainer/training/hooks``, one file a topic.

    Source of names and meanings: transformers 5, ``transformers.Trainer``.
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
    ) -> None:
        check_construction(model, model_init, optimizers, optimizer_cls_and_kwargs, data_collator)
        self.args = args if args is not None else TrainingArguments("tmp_trainer")
        # Kept: asking for it looks for GPUs, which is too slow for every micro-batch.
        self.device = self.args.device
        self._memory_tracker = MemoryTracker(self.device, enabled=not self.args.skip_memory_metrics)
        self.stage = self._memory_tracker.stage("init")
        configure_process(self.args)
        self.model_init = model_init
        self.peft_config = peft_config
        self.model: nn.Module = self._model_of(model) if model is not None else self.call_model_init()
        self.model_wrapped: nn.Module = self.model
        self.is_model_parallel = False
        self.place_model_on_device = bool(getattr(self.args, "place_model_on_device", None))
        if self.place_model_on_device:
            put_on_device(self.model, self.device)
        self.processing_class = processing_class
        self.data_collator = data_collator or collator_for(processing_class)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._given_optimizers = optimizers
        self._optimizer_class = self._class_of_optimizer(optimizer_cls_and_kwargs)
        self.is_in_train = False
        self._engine: TrainingEngine | None = None
        self.weight_check = WeightCheck()
        self._settle()

        progress = PrinterCallback if self.args.disable_tqdm else ProgressCallback
        defaults: list[Any] = [DefaultFlowCallback, RecordsCallback, progress]
        trackers = reporting_callbacks(
            self.args.report_to,
            lambda: self.compiled.to_dict(),
            main_process=self.is_world_process_zero(),
            first_of_machine=self.is_local_process_zero(),
        )
        self._own_callbacks = bool(callbacks)
        self.callback_handler = CallbackHandler(
            [*defaults, *trackers, *(callbacks or ())], self.model, processing_class, self.optimizer, self.lr_scheduler
        )
        self.state = self._new_state()
        self.control = TrainerControl()
        if self.args.push_to_hub:
            self._open_hub()
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)
        self.stage.end()

    # -- train ----------------------------------------------------------------------------------------------------

    @fails_together
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end of ``args``.

        Args:
            resume_from_checkpoint: path of a checkpoint, or True for the newest undamaged one in ``args.output_dir``.
                The path may be one of DeepSpeed's, or of transformers.Trainer: it is converted first.
            trial: values of arguments for this training, by name, or an optuna trial; then the model is new, and the
                trainer has a changed copy of its arguments until it trains without a trial again.
            ignore_keys_for_eval: keys of the model's output that are no predictions in evaluations meanwhile.

        Returns:
            Steps done, mean training loss, metrics.

        Raises:
            ConfigError: no training data, or a checkpoint that does not fit.
            TrainingStopped: a signal, a stop file or a time limit ended it between two steps, at a checkpoint. It is a
                SystemExit: left alone, it ends the process with the exit code that batch scripts understand.
        """
        self._take_trial(trial)
        if self._uncut:
            raise ConfigError(self._uncut)
        asked = find_checkpoint(resume_from_checkpoint, self._output_dir) if resume_from_checkpoint else None

        if self.train_dataset is not None:
            check_dataset(self.train_dataset, "train_dataset", self.batch_plan)
        elif not is_overridden(self, Trainer, "get_train_dataloader"):
            raise ConfigError("train() needs a train_dataset: pass one to the Trainer.")

        with self._in_training():
            check_start(self)
            # Whether anybody's callbacks could decide differently must not itself differ.
            self._own_callbacks = bool(distributed.agree(torch.tensor([int(self._own_callbacks)]))[0])
            self._take_output_dir()
            checkpoint = None
            if resume_from_checkpoint or (self._goes_on_by_itself and trial is None and self._has_begun_before()):
                asked = self._as_ours(asked)
                checkpoint, _ = choose_checkpoint(asked, self._output_dir, self._sharing)
            self._begin_anew()
            if self.args.auto_find_batch_size:
                find_batch_size(self)
            loader = self.get_train_dataloader()
            plan = self._plan_of_run(loader, checkpoint)
            if checkpoint is not None:
                leave_to_checkpoint(self.model, checkpoint)
            self._build(plan.max_steps)
            self.state = self._new_state(plan)
            self._begin(loader)
            self._drop_converted()
            self.callback_handler.train_dataloader = loader
            print_header(self, plan, checkpoint)
            with prepared_for_training(self.model, self.args, self.layout):
                output = TrainLoop(self, plan, self.data_place, ignore_keys_for_eval).run()
        self.save_state()
        self._end_pushes()
        return output

    def _build(self, num_training_steps: int) -> None:
        """Optimizer, schedule and engine, in this order: the engine wraps what the hooks make."""
        note_origin(self.model)
        adapt_model(self.model, self.args, self.compiled, self.processing_class)
        use_split_attention(self.model, self.layout)
        self.create_optimizer_and_scheduler(num_training_steps)
        self._check_optimizer_and_schedule()
        check_swapping(self.optimizer, self.compiled.get("zero_optimization.stage"), precision_of(self.compiled))
        keep_state_where_it_is_saved(self.optimizer)
        optimizer = self.parameter_groups() if self.optimizer is None else self.optimizer
        self._group_members = members_of(optimizer)
        with self._measured_load():
            self._engine = TrainingEngine(
                self.model, optimizer, self.compiled, self.layout, compile_options(self.args), self._reads_logits
            )
        self.optimizer = self._engine.basic_optimizer
        if self.lr_scheduler is None:
            self.lr_scheduler = self._engine.own_schedule or self.create_scheduler(num_training_steps, self.optimizer)
        self.model_wrapped = self._engine.deepspeed
        self.model_wrapped.train()
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        if self.is_world_process_zero():
            write_text_atomic(self._output_dir / "ds_config.json", self.compiled.to_json() + "\n")

    def _new_state(self, plan: RunPlan | None = None) -> TrainerState:
        state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        if self._trial is not None:
            state.is_hyper_param_search = True
            state.trial_name, state.trial_params = self._trial.name, dict(self._trial.params)
        if plan is not None:
            state.max_steps, state.num_train_epochs = plan.max_steps, plan.epochs
            state.train_batch_size = self.args.per_device_train_batch_size
            state.compute_steps(self.args, plan.max_steps)
        return state
