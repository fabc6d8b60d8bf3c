"""``GenerationPhase``: how the ranks get the weights of the model, and in which mode it is, while they generate.

A phase is one call of ``generate``, or everything inside ``Trainer.unwrap_model_for_generation``. With ZeRO-3 the
weights are gathered once for the phase, or DeepSpeed gathers them layer by layer for every token and all ranks stay in
lockstep (``generation_gather``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod
from zlib import crc32

import torch
from torch import nn

from ds_trainer.arguments.enums import When
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.engine.whole_weights import (
    are_whole,
    forget_order_of_modules,
    sharded_parameters,
    whole_weights,
    whole_weights_fit,
)
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.seeds import random_state, restore_random_state

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from ds_trainer.engine.evaluation_engine import EvaluationEngine
    from ds_trainer.engine.training_engine import TrainingEngine


Context = Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]

# Weak references: a context knows the engine, and the engine its model, which would never be freed.
_contexts: WeakKeyDictionary[nn.Module, WeakMethod[Context]] = WeakKeyDictionary()


class GenerationPhase:
    """Prepares the model of an engine for ``generate``.

    Args:
        engine: the engine of training or evaluation.
        args: the current arguments of the Trainer.

    Attributes:
        gathered: whether every rank holds all weights of a ZeRO-3 model now.
    """

    def __init__(self, engine: TrainingEngine | EvaluationEngine, args: Callable[[], TrainingArguments]) -> None:
        self._engine = engine
        self._args = args
        self._open = False
        self.gathered = False

    @contextmanager
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Context of one call of ``generate`` with these arguments; the model keeps its training mode.

        Collective, except inside :meth:`weights` if they are gathered and a replica is one rank.
        """
        from ds_trainer.parallel.attention import use_sharding

        if self._engine.groups.layout.ep > 1:  # the last rank to end needs the experts of the others until then
            kwargs["synced_gpus"] = True
        with ExitStack() as stack:
            stack.enter_context(self.weights())
            stack.enter_context(use_sharding(None, None))
            stack.enter_context(_with_cache(self._engine.deepspeed.module))
            stack.enter_context(same_draws(self._engine.groups, [*args, *kwargs.values()]))
            yield

    @contextmanager
    def weights(self, gather: When | None = None) -> Iterator[None]:
        """Inside, with ZeRO-3, the weights are gathered if ``gather`` or ``generation_gather`` says so.

        Entering is collective, unless the weights are whole already. The outermost context decides.
        """
        if self._open:
            yield
            return
        engine = self._engine.deepspeed
        gathers = self._gathers(engine, gather)
        with whole_weights(engine) if gathers else nullcontext():
            self._open, self.gathered = True, gathers
            try:
                yield
            finally:
                self._open = self.gathered = False
                if not gathers and sharded_parameters(engine):
                    forget_order_of_modules(engine)

    def _gathers(self, engine: Any, gather: When | None) -> bool:
        parameters = sharded_parameters(engine)
        if not parameters or are_whole(parameters):
            return bool(parameters)
        choice = gather or self._args().generation_gather
        # TRL's argument of this meaning; with its True, TRL has gathered the weights itself.
        if choice == When.NEVER or getattr(self._args(), "ds3_gather_for_generation", None) is False:
            return False
        return choice == When.ALWAYS or whole_weights_fit(engine)


@contextmanager
def _with_cache(model: nn.Module) -> Iterator[None]:
    """Inside, layers do not recompute activations, with which a model in training mode would use no key-value cache:
    every token would then cost a pass over all tokens before it.
    """
    modules: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in modules:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True


@contextmanager
def same_draws(groups: ParallelGroups, inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, all ranks of a replica draw the random numbers of its first rank, whose generators go on afterwards.

    Collective over the ranks of the replica; does nothing if a replica is one rank.

    Args:
        groups: the process groups of the layout.
        inputs: arguments of ``generate``; its integer tensors (tokens, masks) must be the same on these ranks.

    Raises:
        ConfigError: they are not.
    """
    if groups.layout.replica_size == 1:
        yield
        return
    own = random_state()
    reports: list[Any] = [None] * groups.layout.replica_size
    digest = 0
    for value in inputs:
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            data = value.detach().to("cpu", torch.int64).contiguous()
            digest = crc32(f"{list(data.shape)}".encode() + data.numpy().tobytes(), digest)
    torch.distributed.all_gather_object(reports, (digest, own), group=groups.replica_host)
    if len({checksum for checksum, _ in reports}) > 1:
        raise ConfigError(
            f"generate was called with different prompts on the ranks of a replica ({groups.layout.describe()}), which "
            "generate together. Inside a training step with sequence sharding, a batch is only the shard of a rank: "
            "generate from prompts that all of them have, for example in get_batch_samples or a callback."
        )
    first = torch.distributed.get_rank(groups.replica_host) == 0
    restore_random_state(reports[0][1])
    try:
        yield
    finally:
        if not first:
            restore_random_state(own)


# The model gets a ``generate`` of its own, a bound method. So copies of the model (copy.deepcopy makes one whose method
# is bound to the copy) are not affected, and neither are other models of the class.


def generate_in_context(model: Any, context: Context) -> None:
    """Let ``model.generate(*args, **kwargs)`` run inside ``context(args, kwargs)``, a bound method, while it exists.

    Does nothing for a model without such a method, or with one that is an attribute of the object already.
    """
    if callable(getattr(type(model), "generate", None)) and "generate" not in vars(model):
        _contexts[model] = WeakMethod(context)
        model.generate = MethodType(generate, model)


def generate_as_before(model: Any) -> None:
    """Undo :func:`generate_in_context`."""
    if _contexts.pop(model, None) is not None:
        del model.generate


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` of the model's class, in the context of this object, if it has one."""
    original = type(model).generate
    reference = _contexts.get(model)
    context = None if reference is None else reference()
    if context is None:
        return original(model, *args, **kwargs)
    with context(args, kwargs):
        return original(model, *args, **kwargs)


# Reads and checks the argument ``generation_config``.


_REMEDY = "Change it, or leave generation_config out to use the model's own."


def read_generation_config(value: Any) -> GenerationConfig:
    """The generation configuration that ``value`` describes.

    Args:
        value: a ``GenerationConfig`` (copied), a mapping of its fields, or a location: a JSON file, a directory with a
            ``generation_config.json``, or a model on the Hub.

    Raises:
        ConfigError: it cannot be read, has unknown fields, or contradictory values.
    """
    from transformers import GenerationConfig

    shown = value.to_dict() if isinstance(value, GenerationConfig) else value
    try:
        if isinstance(value, GenerationConfig):
            config = deepcopy(value)
        elif isinstance(value, Mapping):
            config = _of_fields(value)
        else:
            config = _from_location(Path(os.path.expanduser(os.fspath(value))), str(value))
        problems = _problems(config)
        config.validate(strict=True)
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"generation_config={shown!r}: {_first_line(error)} {_REMEDY}") from error
    if problems:
        raise ConfigError([f"generation_config={shown!r}: {problem} {_REMEDY}" for problem in problems])
    return config


def _of_fields(fields: Mapping[str, Any]) -> GenerationConfig:
    from transformers import GenerationConfig

    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    unknown = [
        f"generation_config: {name!r} is not a field of GenerationConfig.{did_you_mean(name, known)}"
        for name in fields
        if name not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    return GenerationConfig(**fields)


def _from_location(path: Path, name: str) -> GenerationConfig:
    from transformers import GenerationConfig

    if path.is_file():
        return GenerationConfig.from_pretrained(str(path.parent), config_file_name=path.name)
    return GenerationConfig.from_pretrained(str(path) if path.is_dir() else name)


def _problems(config: GenerationConfig) -> list[str]:
    """Problems that transformers' own check does not find and on which ``generate`` fails."""
    positive = ("max_length", "max_new_tokens", "num_beams", "num_return_sequences")
    problems = []
    for name in positive:
        value = getattr(config, name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            problems.append(f"{name}={value!r} must be a positive integer.")
    return problems


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if text.endswith(".") else f"{text}."
