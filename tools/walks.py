#!/usr/bin/env python3
"""Three walks through the code: which functions a batch, an argument and a save pass through, as a run shows them.

    python tools/walks.py                     the three walks
    python tools/walks.py batch               one of them

docs/architecture.md explains each function of these walks; tests/docs/test_architecture.py compares.

Needs the extra ``hf``: a tiny language model of transformers is trained on the CPU, in one process.

What is listed, in the order of first calls, of functions and methods of ``ds_trainer`` (no lambdas, no comprehensions):

* *batch*: what is called once for each micro-batch of an optimizer step of several.
* *argument*: what has the value of ``max_grad_norm`` of a command line among its variables, up to the engine.
  Functions of ``utils/`` and names with an underscore are left out.
* *save*: what ``Trainer.save_checkpoint`` calls from folder to folder. Functions of ``utils/`` and names with an
  underscore are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ds_trainer"
MICRO_BATCHES = 16  # more than the model has tensors: what is called once for each tensor is not listed
STEPS = 24  # the first 20 are watched more closely

sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed

Profile = Callable[[FrameType, str, Any], None]


def name_of(frame: FrameType | None) -> str | None:
    """``file:function`` of a call of the package; None for any other."""
    if frame is None or not frame.f_code.co_filename.startswith(str(PACKAGE)) or frame.f_code.co_name.startswith("<"):
        return None
    code = frame.f_code
    # Python 3.10 does not know qualified names: there, methods have no class.
    function = str(getattr(code, "co_qualname", code.co_name)).replace(".<locals>.", ".")
    return f"{Path(code.co_filename).relative_to(PACKAGE)}:{function}"


def trained(directory: str, *words: str, steps: int = 4, callbacks: Any = ()) -> Any:
    """A Trainer that has run on arguments parsed from ``words``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ds_trainer import HfArgumentParser, Trainer, TrainingArguments

    given = ["--output_dir", directory, "--max_steps", str(steps), "--save_strategy", "no", "--report_to", "none"]
    given += ["--disable_tqdm", "true", "--use_cpu", "true", "--per_device_train_batch_size", "2"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*given, *words])
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    tokens = torch.arange(8)
    data = [{"input_ids": tokens, "labels": tokens}] * 4096
    trainer = Trainer(model, args, train_dataset=data, callbacks=list(callbacks))
    trainer.train()
    return trainer


@contextmanager
def profiled(profile: Profile) -> Iterator[None]:
    """Calls of this thread are shown to ``profile``."""
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def step() -> list[tuple[str, int]]:
    """All that one of the last optimizer steps calls, with the number of calls."""
    from ds_trainer import TrainerCallback

    calls: dict[str, int] = {}

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        name = name_of(frame) if event == "call" else None
        if name is not None:
            calls[name] = calls.get(name, 0) + 1

    class Traced(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == STEPS - 2:
                sys.setprofile(profile)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            sys.setprofile(None)

    with tempfile.TemporaryDirectory() as directory:
        trained(directory, "--gradient_accumulation_steps", str(MICRO_BATCHES), steps=STEPS, callbacks=[Traced()])
    return list(calls.items())


def batch() -> list[str]:
    """What a micro-batch passes through."""
    return [name for name, count in step() if count >= MICRO_BATCHES]


def argument() -> list[str]:
    """Where the value of an argument is seen."""
    value = "0.0123457"
    seen: dict[str, None] = {}

    def is_it(found: Any) -> bool:
        return found == float(value) if type(found) is float else isinstance(found, str) and found == value

    def holds(found: Any) -> bool:
        if isinstance(found, dict) and len(found) < 500:
            return any(map(is_it, list(found.values())))
        return any(map(is_it, found)) if isinstance(found, list | tuple) and len(found) < 500 else is_it(found)

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        name = name_of(frame) if event in ("call", "return") else None
        if name is not None and (holds(arg) or any(map(holds, list(frame.f_locals.values())))):
            seen.setdefault(name)

    with tempfile.TemporaryDirectory() as directory, profiled(profile):
        trained(directory, "--max_grad_norm", value)
    names = list(seen)
    end = max(index for index, name in enumerate(names) if name.startswith("engine/"))
    return [name for name in names[: end + 1] if _is_told(name)]


def save() -> list[str]:
    """What a save calls, from folder to folder."""
    calls: dict[str, None] = {}

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        name = name_of(frame) if event == "call" else None
        if name is None:
            return
        caller = frame.f_back
        while caller is not None and name_of(caller) is None:
            caller = caller.f_back
        before = name_of(caller)
        if before is None or before.rpartition("/")[0] != name.rpartition("/")[0]:
            calls.setdefault(name)

    with tempfile.TemporaryDirectory() as directory:
        trainer = trained(directory)
        with profiled(profile):
            trainer.save_checkpoint()
    return [name for name in calls if _is_told(name)]


def _is_told(name: str) -> bool:
    file, _, function = name.partition(":")
    return not file.startswith("utils/") and not any(part.startswith("_") for part in function.split("."))


WALKS = {"batch": batch, "argument": argument, "save": save}


def main() -> None:
    """Print the walks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walk", nargs="?", choices=WALKS, help="default: all")
    chosen = parser.parse_args().walk
    for name in [chosen] if chosen else WALKS:
        print(f"{name}:", *WALKS[name](), sep="\n  ")


if __name__ == "__main__":
    main()
