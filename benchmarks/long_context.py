"""Peak memory of a training step on a long sequence, with and without the features of ``long_context``.

    python benchmarks/long_context.py                       64K tokens on 4 CPU ranks (cp 2 x sp 2), a small Llama
    python benchmarks/long_context.py --length 16K --layers 8
    python benchmarks/long_context.py --only off on         cases by name
    python benchmarks/long_context.py --json FILE           also write every number

``benchmarks/live_tensors.py`` counts the tensors of each rank during one step; the table has the rank with most. The
CPU stands for the device: buffers of ``activation_offload``, host memory beside a GPU, are counted apart.

Cases: ``off`` (sequences are sharded, nothing else), one feature at a time, and ``on`` (``long_context=True``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from kept_results import Results
from live_tensors import LiveTensors

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.training.model.activation_offload import HostBuffers
from ds_trainer.utils.units import parse_tokens
from tests.support.pool import close_pools, pool

RANKS = 4
SECONDS = 3600.0  # until a case counts as hung
CASES: dict[str, dict[str, Any]] = {
    "off": {},
    "checkpointing": {"activation_checkpointing": True},
    "checkpointing, tiled": {"activation_checkpointing": True, "tiled_mlp": True},
    "checkpointing, offload": {"activation_checkpointing": True, "activation_offload": True},
    "on": {"long_context": True, "activation_offload": True},  # on a GPU, long_context alone turns it on
}


class Row(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """One row of random tokens."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self.tokens = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens, "labels": self.tokens}


def llama(shape: dict[str, int]) -> nn.Module:
    """Two heads; otherwise the proportions of Llama 3 8B, where ``shape`` does not say otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    hidden = shape["hidden"]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocabulary"],
            hidden_size=hidden,
            intermediate_size=hidden * 7 // 2,
            num_hidden_layers=shape["layers"],
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=shape["length"],
        )
    )


class DeviceTensors(LiveTensors):
    """Counts tensors, except those in buffers of :class:`HostBuffers`."""

    def __init__(self) -> None:
        super().__init__()
        self.host_bytes = 0
        self._host: set[int] = set()
        take = HostBuffers.take

        def counted(buffers: HostBuffers, size: int, pinned: bool) -> torch.Tensor | None:
            with _disable_current_modes():
                buffer = take(buffers, size, pinned)
            if buffer is not None:
                self._host.add(buffer.untyped_storage()._cdata)
            self.host_bytes = max(self.host_bytes, buffers.bytes)
            return buffer

        self.patch = mock.patch.object(HostBuffers, "take", counted)

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._host:
            super()._add(storage)


class OfStep(TrainerCallback):
    """The peak of a step, model and optimizer states included."""

    def __init__(self, live: DeviceTensors) -> None:
        self.live = live
        self.peak = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.live.reset_peak()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.peak = self.live.peak


def measure(shape: dict[str, int], arguments: dict[str, Any]) -> dict[str, float]:
    """On a rank: one step. Bytes at most on the device and on the host, and the loss."""
    live = DeviceTensors()
    callback = OfStep(live)
    with tempfile.TemporaryDirectory() as directory, live, live.patch:
        args = TrainingArguments(
            directory,
            use_cpu=True,
            max_steps=1,
            per_device_train_batch_size=1,
            context_parallel_size=2,
            sequence_parallel_size=2,
            zero_stage=2,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            self_test="never",
            hang_timeout=0,
            **arguments,
        )
        data = Row(shape["length"], shape["vocabulary"])
        trainer = Trainer(llama(shape), args, train_dataset=data, callbacks=[callback])
        trainer.train()
        trainer.engine.close()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"device_bytes": callback.peak, "host_bytes": live.host_bytes, "loss": losses[0]}


def run_case(name: str, shape: dict[str, int]) -> dict[str, Any]:
    """A case on all ranks: the largest numbers."""
    found = pool(RANKS).run(partial(measure, shape, CASES[name]), timeout=SECONDS)
    most = {key: max(rank[key] for rank in found) for key in found[0]}
    return {"case": name, **shape, **CASES[name], **most}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=parse_tokens, default=parse_tokens("64K"))
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    shape = {name: getattr(given, name) for name in ("length", "hidden", "layers", "vocabulary")}
    results = Results(given.json, "cpu", ranks=RANKS)
    try:
        for name in given.only:
            case = run_case(name, shape)
            ratio = case["device_bytes"] / results.cases[0]["device_bytes"] if results.cases else 1.0
            results.add({**case, "ratio": round(ratio, 4)})
            print(
                f"{name:24s} device {case['device_bytes'] / 2**20:8.1f} MiB  ratio {ratio:5.3f}  "
                f"host {case['host_bytes'] / 2**20:7.1f} MiB  loss {case['loss']:.6f}",
                flush=True,
            )
    finally:
        close_pools()
    return results.cases


if __name__ == "__main__":
    main()
