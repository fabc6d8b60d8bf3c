"""Counts how often the host waits for the device in a step, and which code makes it wait.

A small Llama is trained on one rank. During some steps in the middle, every operation that makes the host wait is
counted by its caller: this package, DeepSpeed, or other code. On a GPU, ``torch.cuda.set_sync_debug_mode`` reports
these operations. On the CPU, the run simulates a device (tests/support/host_syncs.py), which shows the same calls.

    python benchmarks/gpu_syncs.py --out syncs.json
    python benchmarks/gpu_syncs.py --device cpu --stages 1

Waits that DeepSpeed causes are listed only. The exit code is 1 if this package makes the host wait.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from kept_results import Results
from torch import nn
from torch.utils.data import Dataset

from ds_trainer import Trainer, TrainerCallback, TrainingArguments

WARMUP, WATCHED, AFTER, ACCUMULATION = 5, 3, 1, 2
VOCABULARY, LENGTH, SEED = 256, 32, 42
_ROOT = Path(__file__).resolve().parents[1]
_OURS, _DEEPSPEED, _OTHERS = "ds_trainer", "deepspeed", "others"

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a callback of the user's": {},
    "saves in the background": {"save_strategy": "steps", "save_steps": WARMUP},
}


class Nothing(TrainerCallback):
    """A user's callback that decides nothing, which the Trainer cannot know."""


class Window(TrainerCallback):
    """Watches from the end of step ``WARMUP + 1`` on, so that a save after step ``WARMUP`` is in progress."""

    def __init__(self, switch: Callable[[bool], None]) -> None:
        self._switch = switch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARMUP + 1:
            self._switch(True)
        elif state.global_step == WARMUP + 1 + WATCHED:
            self._switch(False)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 2 * ACCUMULATION * (WARMUP + 1 + WATCHED + AFTER)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def build_model() -> nn.Module:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes))


# -- the origin of a wait ------------------------------------------------------------------------------------------


def origin(files: Sequence[str]) -> str:
    """The caller: the package of the first file, innermost first, that is not in torch."""
    first = next((file for file in files if not file.startswith("torch/")), "")
    return first.split("/")[0] if first.startswith((f"{_OURS}/", f"{_DEEPSPEED}/")) else _OTHERS


def short(file: str) -> str:
    """A path without what depends on the machine: relative to where Python found it."""
    folders = [f"{folder}/" for folder in (str(_ROOT), *sys.path) if folder and file.startswith(f"{folder}/")]
    return file.removeprefix(max(folders, key=len, default=""))


class OnGpu:
    """Counts the warnings of torch's synchronization debug mode."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def switch(self, on: bool) -> None:
        """Begin or end counting."""
        torch.cuda.set_sync_debug_mode("warn" if on else "default")

    @contextmanager
    def running(self) -> Iterator[None]:
        """For the whole run."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            before = warnings.showwarning

            def note(message: Any, *args: Any, **kwargs: Any) -> None:
                if "synchronizing CUDA operation" not in str(message):
                    before(message, *args, **kwargs)
                    return
                if threading.current_thread().name.startswith("ds_trainer"):
                    return  # the thread that writes a checkpoint may wait
                stack = [
                    f for f in reversed(traceback.extract_stack()) if f.filename not in (__file__, warnings.__file__)
                ]
                files = [short(frame.filename) for frame in stack]
                place = next((n for n, file in enumerate(files) if not file.startswith("torch/")), 0)
                self.found.append((origin(files), f"{files[place]}:{stack[place].lineno} {stack[place].name}"))

            warnings.showwarning = note
            try:
                yield
            finally:
                self.switch(False)


class Pretended:
    """Counts on the CPU what would wait on a GPU."""

    def __init__(self) -> None:
        from tests.support.host_syncs import PretendedDevice

        self._device = PretendedDevice()

    def switch(self, on: bool) -> None:
        """Begin or end counting."""
        self._device.watching = on

    def running(self) -> AbstractContextManager[Any]:
        """For the whole run."""
        return self._device.pretended()

    @property
    def found(self) -> list[tuple[str, str]]:
        """Who and where."""
        records = [record for record in self._device.records if "host collective" not in record.kind]
        return [(origin([line.split(":")[0] for line in one.stack]), f"{one.stack[0]}: {one.kind}") for one in records]


# -- one case ------------------------------------------------------------------------------------------------------


def measure(stage: int, variant: str, device: str) -> dict[str, Any]:
    """Waits a step, by origin and place."""
    watch: OnGpu | Pretended = OnGpu() if device == "cuda" else Pretended()
    with watch.running(), tempfile.TemporaryDirectory() as output_dir:
        args = TrainingArguments(
            output_dir,
            zero_stage=stage,
            bf16=device == "cuda",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=WARMUP + 1 + WATCHED + AFTER,
            logging_steps=10**9,
            **{"save_strategy": "no", **VARIANTS[variant]},
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        callbacks = [Nothing()] if variant == "a callback of the user's" else []
        trainer = Trainer(build_model(), args, train_dataset=Rows(), callbacks=callbacks)
        # Not by add_callback, which would make it a callback of the user's.
        trainer.callback_handler.add_callback(Window(watch.switch))
        trainer.train()
        trainer.engine.close()
    by_origin = Counter(who for who, _ in watch.found)
    return {
        "stage": stage,
        "variant": variant,
        "waits_a_step": {who: by_origin[who] / WATCHED for who in (_OURS, _DEEPSPEED, _OTHERS)},
        "places": [[who, place, count / WATCHED] for (who, place), count in Counter(watch.found).most_common()],
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """A line for each case, and below it the callers that made the host wait."""
    lines = ["| ZeRO | run | waits a step: ds_trainer | DeepSpeed | others |", "|---|---|---|---|---|"]
    for one in found:
        if "error" in one:
            lines.append(f"| {one['stage']} | {one['variant']} | FAILED: {one['error'].splitlines()[0][:120]} | | |")
            continue
        counts = " | ".join(f"{one['waits_a_step'][who]:g}" for who in (_OURS, _DEEPSPEED, _OTHERS))
        lines.append(f"| {one['stage']} | {one['variant']} | {counts} |")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], help="ZeRO stages")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    results = Results(options.out, options.device, options.minutes)
    for stage in options.stages:
        for variant in VARIANTS:
            if results.out_of_time:
                continue
            try:
                results.add(measure(stage, variant, options.device))
            except Exception as error:
                traceback.print_exc()
                results.add({"stage": stage, "variant": variant, "error": f"{type(error).__name__}: {error}"[:2000]})
            for who, place, count in results.cases[-1].get("places", []):
                print(f"ZeRO {stage}, {variant}: {count:g} a step, {who}: {place}", flush=True)
    print("\n" + table(results.cases))
    return 1 if any("error" in one or one["waits_a_step"][_OURS] for one in results.cases) else 0


if __name__ == "__main__":
    sys.exit(main())
