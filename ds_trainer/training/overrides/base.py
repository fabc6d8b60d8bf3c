"""``TrainerBase``: the attributes of the Trainer that its overridable methods share."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_trainer.accelerator.trainer_accelerator import TrainerAccelerator
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.protocol import ASSEMBLY
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine
    from ds_trainer.training.assembly import Assembly
    from ds_trainer.training.protocol import TrainerProtocol as _Declared
else:
    _Declared = object

logger = get_logger(__name__)


class _Exposed:
    """An attribute of the machinery that can be read on the Trainer. A subclass may use the name for something else."""

    def __init__(self, path: str, doc: str) -> None:
        self.__doc__ = doc
        self._read = attrgetter(path)
        self._owner, _, self._attribute = path.rpartition(".")

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        attributes = vars(trainer)
        if ASSEMBLY in attributes:
            return self._read(attributes[ASSEMBLY])
        if self._name not in attributes:
            raise AttributeError(self._name)
        return attributes[self._name]


class _ExposedAttribute(_Exposed):
    """An attribute of the Trainer that a component keeps, like ``args``. What a subclass sets before the constructor of
    the Trainer has begun stays on the object.
    """

    def __set__(self, trainer: Any, value: Any) -> None:
        attributes = vars(trainer)
        if ASSEMBLY in attributes:
            owner = attributes[ASSEMBLY]
            setattr(attrgetter(self._owner)(owner) if self._owner else owner, self._attribute, value)
        else:
            attributes[self._name] = value


def shown(path: str, doc: str) -> Any:
    """See :class:`_Exposed`; ``path`` leads from the machinery to the attribute."""
    return _Exposed(path, doc)


def kept(path: str, doc: str) -> Any:
    """See :class:`_ExposedAttribute`; ``path`` leads from the machinery to the attribute."""
    return _ExposedAttribute(path, doc)


class TrainerBase(_Declared):
    """Attributes that :class:`ds_trainer.training.trainer.Trainer` has before any overridable method is called.

    ``self`` belongs to the script. Besides the names of transformers' Trainer there are five, and a subclass may use
    them for something else: ``engine``, ``layout``, ``tokenizer``, ``save_checkpoint``,
    ``unwrap_model_for_generation``.
    """

    _ds_trainer: Assembly
    """The machinery: components, configuration, engine."""

    model: nn.Module
    model_wrapped: nn.Module
    optimizer: Any
    lr_scheduler: Any
    label_names: list[str]
    label_smoother: Any

    args: TrainingArguments = kept("events.args", "The training arguments; during a trial, those of the trial.")
    state: TrainerState = kept("events.state", "The state that callbacks see.")
    control: TrainerControl = kept("events.control", "The decisions of the callbacks.")
    callback_handler: CallbackHandler = kept("events.handler", "The callbacks.")
    optimizer_cls_and_kwargs: Any = kept("optimizer_cls_and_kwargs", "The argument of this name of the constructor.")
    neftune_noise_alpha: float | None = kept(
        "args.neftune_noise_alpha", "The scale of NEFTune's noise in the next training."
    )
    model_accepts_loss_kwargs: bool = kept(
        "losses.normalized", "Whether the loss is a sum divided by ``num_items_in_batch``; set it to False for a mean."
    )
    current_gradient_accumulation_steps: int = kept(
        "accumulation", "Number of micro-batches of this rank in the current step; 1 before a training."
    )
    loss_is_scaled_for_ga: bool | None = None
    """What the losses of ``compute_loss`` are, for subclasses that compute their own: True if those of a step's
    micro-batches add up to the loss of a replica, False if each is a mean. None: found out at the first step."""

    tokenizer: Any = shown("trainer.processing_class", "Older name of ``processing_class``, as in transformers 4.")
    layout: ParallelLayout = shown("layout", "The layout of the job.")
    engine: TrainingEngine = shown(
        "engines.training", "The engine of the training. Raises ConfigError before the first ``train``."
    )
    deepspeed: Any = shown("deepspeed", "DeepSpeed's engine, as ``model_wrapped`` is; None before the first ``train``.")
    hub_model_id: str | None = shown(
        "publisher.repository_id",
        "``owner/name`` of the repository; None until :meth:`init_hf_repo` has opened it, and on other ranks.",
    )
    objective: Any = shown("trials.objective", "The objective of the last evaluation of the trial.")
    current_flos: float = shown("telemetry.flops", "Operations of this rank that :meth:`store_flos` has not added yet.")
    _train_batch_size: int = shown("train_batch_size", "Samples of a micro-batch of one replica.")

    def create_accelerator_and_postprocess(self) -> None:
        """Set ``self.accelerator`` and the flags that scripts read. Called when the configuration is compiled."""
        assembly = self._ds_trainer
        self.accelerator = TrainerAccelerator(
            assembly.layout,
            self.args,
            assembly.compiled,
            lambda: assembly.engines.training_or_none,
            lambda: join_ranks(assembly.args),
            lambda: self.model,
        )
        pinned = self.args.dataloader_pin_memory
        if self.accelerator.non_blocking and not pinned:
            logger.warning(
                "accelerator_config: non_blocking=True has no effect without dataloader_pin_memory=True: copies from "
                "memory that is not pinned wait for the device."
            )
        self.is_deepspeed_enabled = True
        self.is_fsdp_enabled = False

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of the whole job."""
        return self.args.process_index == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its machine."""
        return self.args.local_process_index == 0
