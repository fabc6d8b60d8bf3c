"""Trains with and without each feature that must not change a number, on this device, and compares.

Each pair is two trainings of a small Llama: loss and gradient norm of every step, and the weights at the end. Samples
are ragged, so a packed row has borders. Packed rows go through the kernels for samples of different lengths; the other
side reads the mask of all pairs. fp8 is compared with bf16, within a band.

    python benchmarks/gpu_pairs.py --out pairs.json
    python benchmarks/gpu_pairs.py --device cpu --cases packed tiled
    python benchmarks/gpu_pairs.py --list

The exit code is 1 if a pair differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_oracle import DECAY, RATE, SEED, Trajectory, differences
from kept_results import Results
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, HIDDEN, LONGEST, MICRO_BATCH, STEPS = 512, 128, 96, 2, 5
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp8": 1e-1}
"""Largest relative difference of losses, gradient norms and weights."""

RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
PACKED = {"packing": True, "max_length": 2 * LONGEST}


@dataclass(frozen=True)
class Pair:
    """Two runs.

    Attributes:
        one, other: arguments of each. ``attention`` is transformers' ``attn_implementation``; with ``encoder`` the
            model is a BERT that predicts masked tokens, otherwise a Llama.
        package: what must be installed.
        devices: kinds of devices that can run it.
    """

    name: str
    one: dict[str, Any]
    other: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    package: str | None = None
    devices: tuple[str, ...] = ("cuda", "cpu")


def pairs() -> list[Pair]:
    """All pairs."""
    gpu: dict[str, Any] = {"devices": ("cuda",)}
    made = []
    for name in ("fp32", "bf16"):
        half = {"bf16": True} if name == "bf16" else {}
        eager = {**PACKED, **half, "attention": "eager"}
        made += [
            Pair(f"packed {name}", {**PACKED, **half}, eager, name),
            Pair(f"packed {name}, zero3", {**PACKED, **half, "zero_stage": 3}, eager, name),
            Pair(f"packed encoder {name}", {**PACKED, **half, "encoder": True}, {**eager, "encoder": True}, name),
            Pair(f"packed {name}, recomputed", {**PACKED, **half, **RECOMPUTED}, eager, name),
            Pair(f"chunked loss {name}", {**half, "loss_chunk_tokens": 64}, {**half, "loss_chunk_tokens": 0}, name),
            Pair(f"tiled MLPs {name}", {**half, "tiled_mlp": True}, half, name),
            Pair(f"offloaded activations {name}", {**half, **RECOMPUTED, "activation_offload": True}, half, name),
            Pair(f"compiled blocks {name}", {**half, "torch_compile_regional": True}, half, name, **gpu),
        ]
    long = {**PACKED, "long_context": True, "activation_offload": True, "zero_stage": 3}
    made += [
        Pair("long context, packed, zero3", long, PACKED),
        Pair("offloaded activations, zero3", {**RECOMPUTED, "activation_offload": True, "zero_stage": 3}),
        Pair("compiled blocks, packed", {**PACKED, "torch_compile_regional": True}, PACKED, **gpu),
        Pair("compiled blocks, zero3", {"torch_compile_regional": True, "zero_stage": 3}, **gpu),
        Pair("fp8", {"bf16": True, "fp8": True}, {"bf16": True}, "fp8", "torchao", ("cuda",)),
        Pair("fp8, compiled blocks, zero2", {"bf16": True, "fp8": True, "torch_compile_regional": True,
             "zero_stage": 2}, {"bf16": True}, "fp8", "torchao", ("cuda",)),
        # Last: Liger replaces functions of the module that has the model, and they stay.
        Pair("Liger's kernels", {"use_liger_kernel": True}, package="liger_kernel", **gpu),
        Pair("Liger's kernels bf16, packed", {**PACKED, "bf16": True, "use_liger_kernel": True},
             {**PACKED, "bf16": True}, "bf16", "liger_kernel", ("cuda",)),
    ]  # fmt: skip
    return made


def build_model(attention: str, encoder: bool) -> nn.Module:
    """The same weights at every call."""
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4 * LONGEST}
    shape["attn_implementation"] = attention
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: nn.Module
    if encoder:
        model = BertForMaskedLM(BertConfig(**shape, **dropout))
        for name, parameter in model.named_parameters():
            if name.endswith("key.bias"):  # the softmax does not see it: its gradient is rounding, which Adam enlarges
                parameter.requires_grad_(False)
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, use_cache=False))
    return model


class Ragged(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, 8 to ``LONGEST`` a sample."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(SEED)
        self.lengths = torch.randint(8, LONGEST + 1, (8 * MICRO_BATCH * STEPS,), generator=draw).tolist()
        self.tokens = torch.randint(VOCABULARY, (len(self.lengths), LONGEST), generator=draw)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index, : self.lengths[index]]
        return {"input_ids": row, "labels": row}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch of ``LONGEST`` tokens a row: the sizes that fp8 and compiled blocks are given do not change."""
    made = {"input_ids": torch.zeros(len(rows), LONGEST, dtype=torch.long)}
    made["attention_mask"], made["labels"] = torch.zeros_like(made["input_ids"]), made["input_ids"] - 100
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        made["input_ids"][number, :length], made["labels"][number, :length] = row["input_ids"], row["labels"]
        made["attention_mask"][number, :length] = 1
    return made


def train(given: dict[str, Any], device: str) -> Trajectory:
    """One run."""
    from ds_trainer import Trainer, TrainingArguments
    from ds_trainer.engine.weights import gathered

    values = dict(given)
    model = build_model(values.pop("attention", "sdpa"), values.pop("encoder", False))
    with tempfile.TemporaryDirectory() as output_dir:
        args = TrainingArguments(
            output_dir,
            **{
                "per_device_train_batch_size": MICRO_BATCH,
                "gradient_accumulation_steps": 2,
                "max_steps": STEPS,
                "learning_rate": RATE,
                "weight_decay": DECAY,
                "zero_stage": 1,
                "lr_scheduler_type": "constant",
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                "use_cpu": device == "cpu",
                **values,
            },
        )
        options: dict[str, Any] = {} if "packing" in values else {"data_collator": padded}
        trainer = Trainer(model, args, train_dataset=Ragged(), **options)
        trainer.log_metrics = lambda *args, **kwargs: None  # type: ignore[method-assign]
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        parameters = dict(trainer.model.named_parameters())
        with gathered(list(parameters.values())):
            # A compiled block is named like the block.
            weights = {name.replace("_orig_mod.", ""): p.detach().cpu().double() for name, p in parameters.items()}
        trainer.engine.close()
    return Trajectory([entry["loss"] for entry in logs], [entry["grad_norm"] for entry in logs], weights)


def compare(pair: Pair, device: str) -> dict[str, Any]:
    """Differences, and whether they are small enough."""
    wanted = train(pair.other, device)
    found = differences(train(pair.one, device), wanted, STEPS)
    tolerance = TOLERANCE[pair.precision]
    return {
        "differences": found,
        "tolerance": tolerance,
        "passed": all(difference <= tolerance for difference in found.values()),
    }


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="pairs whose name contains one of these")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no pair after this time")
    parser.add_argument("--list", action="store_true", help="print the names of the pairs and end")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    chosen = [
        pair
        for pair in pairs()
        if options.device in pair.devices
        and (pair.package is None or find_spec(pair.package))
        and (not options.cases or any(text in pair.name for text in options.cases))
    ]
    if options.list:
        print("\n".join(pair.name for pair in chosen))
        return 0
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    results = Results(options.out, options.device, options.minutes)
    for pair in chosen:
        if results.out_of_time:
            break
        try:
            found = compare(pair, options.device)
        except Exception as error:  # the next pair may do better
            traceback.print_exc()
            found = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        results.add({"name": pair.name, **found})
        print(pair.name, found, flush=True)
    print(f"{sum(case['passed'] for case in results.cases)} of {len(chosen)} pairs agree")
    return 0 if results.cases and all(case["passed"] for case in results.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
