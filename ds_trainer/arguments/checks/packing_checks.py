"""Checks of the arguments of sample packing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_trainer.arguments.redefined import is_redefined, packs
from ds_trainer.utils.sizes import parse_tokens

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments


def packing_argument_problems(args: TrainingArguments) -> list[str]:
    """One sentence for each invalid value or combination."""
    problems = length_problems(args.max_length) if not is_redefined(args, "max_length") else []
    if not packs(args):
        if not is_redefined(args, "eval_packing") and args.eval_packing:
            problems.append("eval_packing=True needs packing=True.")
        return problems
    if str(args.train_sampling_strategy) in ("group_by_length", "batch_rebalance"):
        problems.append(
            f"train_sampling_strategy={args.train_sampling_strategy} arranges samples by length, but with packing=True "
            "all rows have the same length. Set it to random or sequential, or set packing=False."
        )
    if getattr(args, "sortish_sampler", False):
        problems.append(
            "sortish_sampler=True arranges samples by length, but with packing=True all rows have the same length. Set "
            "one of them to False."
        )
    if args.use_cache:
        problems.append(
            "packing=True and use_cache=True: with a key-value cache, models do not keep packed samples apart. Set "
            "use_cache=False."
        )
    return problems


def length_problems(length: int | str | None) -> list[str]:
    """What is wrong with a ``max_length``."""
    try:
        if length is None or (parse_tokens(length) if isinstance(length, str) else length) > 0:
            return []
    except ValueError:
        pass
    return [f"max_length={length!r} must be a positive number of tokens, such as 4096, '64K' or '1M', or None."]
