"""What a rank does with an optimizer of a script: those that swap weights for an evaluation, with ``train()`` and
``eval()``; and whether one gives the same update when its tensors are divided, as ZeRO does.

ZeRO gives an optimizer a part of all tensors of a group in a row: a norm, a mean of rows or a factorization is then
that of the part. At stage 3 it calls ``step`` once for each part of a group, so that a count of its own is wrong, too.
What an optimizer does is measured: on copies with two small tensors a group, whole and divided between two ranks.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from inspect import Parameter, signature
from typing import Any

import torch

from ds_trainer.engine.weights import full_shape
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.seeds import random_state, restore_random_state

logger = get_logger(__name__)

_SIZES = 4, 6, 3, 2
_STEPS, _GROUPS, _TENSORS = 3, 4, 2
_TOLERANCE = 1e-4
_GIVEN = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")


def check_divided_updates(optimizer: Any, stage: int, tensor_parallel: int, expert_parallel: int = 1) -> None:
    """Refuse an optimizer of a script whose ``step`` needs arguments, or depends on how its tensors are divided.

    Args:
        optimizer: before DeepSpeed has it; it does not change.
        stage: of ZeRO.
        tensor_parallel: ranks that share a tensor.
        expert_parallel: ranks that share the experts.

    Raises:
        ConfigError: ``step`` needs arguments, or the update of a whole tensor is another one.
    """
    if optimizer is None or _is_elementwise(optimizer):
        return
    name = type(optimizer).__name__
    if needed := [
        parameter.name
        for parameter in list(signature(type(optimizer).step).parameters.values())[1:]
        if parameter.default is parameter.empty and parameter.kind in _GIVEN
    ]:
        raise ConfigError(
            f"step() of {name} needs {listed(needed)}, and the engine calls it without arguments, once an update. "
            "Use an optimizer that needs the gradients only."
        )
    divided = stage > 0 or tensor_parallel * expert_parallel > 1
    axis, ranks = ("tensor", tensor_parallel) if expert_parallel == 1 else ("expert", expert_parallel)
    division = f"zero_stage={stage}" if stage else f"{axis}_parallel_size={ranks}"
    random = random_state()
    try:
        whole, again = (_updated(optimizer, 1, stage) for _ in range(2))
        reason = _difference(optimizer, whole, stage) if divided else ""
    except Exception as error:
        if _runs_with_closure(optimizer, stage):
            raise ConfigError(_CLOSURE.format(name=name, error=error)) from error
        if divided:
            logger.warning("%s could not be tried on divided tensors, which %s gives it: %s", name, division, error)
        return
    finally:
        restore_random_state(random)
    if reason and not _apart(whole, again):  # one that draws numbers is not compared
        raise ConfigError(
            f"The update of {name} depends on whole tensors, or on how often step() is called, and {division} divides "
            f"them: {reason}. Set zero_stage=0 (without {axis}_parallel_size), or use an optimizer that treats each "
            "element by itself."
        )


_CLOSURE = (
    "step() of {name} fails without a closure ({error}), and the engine calls it without arguments, once an update. An "
    "optimizer that computes gradients itself (SAM, LBFGS) cannot be used."
)


def _runs_with_closure(optimizer: Any, stage: int) -> bool:
    try:
        _updated(optimizer, 1, stage, lambda: torch.zeros(()))
    except Exception:
        return False
    return True


def _is_elementwise(optimizer: Any) -> bool:
    return any(type(optimizer) is getattr(torch.optim, name) for name in _ELEMENTWISE)


def _difference(optimizer: Any, whole: torch.Tensor, stage: int) -> str:
    try:
        return "the results would differ" if _apart(whole, _updated(optimizer, 2, stage)) else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * float(one.abs().max()))


def _updated(optimizer: Any, ranks: int, stage: int, *closure: Any) -> torch.Tensor:
    """All values of the tensors after some steps on so many ranks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        [_SIZES[: len(full_shape(parameter))] for parameter in group["params"][:_TENSORS]]
        for group in optimizer.param_groups[:_GROUPS]
    ]
    draws = [
        [[torch.randn(shape, generator=generator) for shape in group] for group in shapes] for _ in range(1 + _STEPS)
    ]
    start, *gradients = draws
    parameters = []
    for rank in range(ranks):

        def parts(tensors: list[torch.Tensor], rank: int = rank) -> list[torch.Tensor]:
            if ranks == 1:
                return [tensor.clone() for tensor in tensors]
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            cut = len(flat) // 2 + 1
            return [(flat[cut:] if rank else flat[:cut]).clone()]

        probe, groups = _copied(optimizer, [parts(group) for group in start])
        for gradient in gradients:
            for group, values in zip(groups, gradient, strict=True):
                for parameter, value in zip(group, parts(values), strict=True):
                    parameter.grad = value
            for turn in [[place] for place in range(len(groups))] if ranks > 1 and stage == 3 else [range(len(groups))]:
                for place, group in enumerate(groups):
                    probe.param_groups[place]["params"] = group if place in turn else []
                # Not the attribute: a schedule has wrapped the method of the original.
                type(probe).step(probe, *closure)
        parameters.append([torch.cat([parameter.detach().flatten() for parameter in group]) for group in groups])
    return torch.cat([torch.cat(group) for group in zip(*parameters, strict=True)])


def _copied(optimizer: Any, values: list[list[torch.Tensor]]) -> tuple[Any, list[list[torch.nn.Parameter]]]:
    """A copy of ``optimizer`` whose groups have tensors of these values, and these tensors."""
    groups = [[torch.nn.Parameter(value) for value in group] for group in values]
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    for number, group in enumerate(optimizer.param_groups):
        memo |= {id(parameter): groups[min(number, len(groups) - 1)][0] for parameter in group["params"]}
    probe = _duplicate(optimizer, memo)
    vars(probe).pop("step", None)
    del probe.param_groups[len(groups) :]
    for group, own in zip(probe.param_groups, groups, strict=True):
        group["params"] = own
        if "lr" in group:
            group["lr"] = 0.01  # 0 at the beginning of a warmup
    return probe, groups


def _duplicate(optimizer: Any, memo: dict[int, Any]) -> Any:
    """With all its attributes, and those of optimizers in it; ``copy.deepcopy`` keeps those of torch only."""
    memo[id(optimizer)] = duplicate = object.__new__(type(optimizer))
    for value in vars(optimizer).values():
        if isinstance(value, torch.optim.Optimizer):
            _duplicate(value, memo)
        elif isinstance(value, torch.nn.Module):
            memo[id(value)] = value
    vars(duplicate).update(copy.deepcopy(vars(optimizer), memo))
    return duplicate


def swaps_weights(optimizer: Any) -> bool:
    """Whether ``optimizer`` has ``train()`` and ``eval()``, like the schedule-free optimizers."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def use_training_weights(optimizer: Any) -> None:
    """Switches to the training weights; does nothing if they are in use, or for other optimizers."""
    if swaps_weights(optimizer):
        optimizer.train()


def use_evaluation_weights(optimizer: Any) -> None:
    """Switches to the evaluation weights, like :func:`use_training_weights`."""
    if swaps_weights(optimizer):
        optimizer.eval()


def check_weight_swapping(optimizer: Any, stage: int, precision: str) -> None:
    """Checks a user's optimizer: weights that it swaps in DeepSpeed's copies would never reach the model.

    Raises:
        ConfigError: at ZeRO stages above 0 and in 16-bit precision.
    """
    if swaps_weights(optimizer) and (stage > 0 or precision != "fp32"):
        raise ConfigError(
            f"{type(optimizer).__name__} uses different weights for evaluation (train() and eval()), but with "
            f"zero_stage={stage} and precision {precision} DeepSpeed gives it copies of the weights. Set zero_stage=0 "
            "and leave bf16 and fp16 off (torch_autocast=bf16 works)."
        )
