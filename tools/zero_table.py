#!/usr/bin/env python3
"""Which ZeRO stage fits which model on which GPUs: the tables of docs/how-to/choose-zero-stage.md, from formulas.

    python tools/zero_table.py            print the tables
    python tools/zero_table.py --write    put them into the page

Bytes are counted, nothing is measured. Source of the model states: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", section 3; of the activations: Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4, without attention scores, as fused attention keeps none.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer import ModelShape

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "choose-zero-stage.md"
BEGIN, END = "<!-- made by tools/zero_table.py -->", "<!-- end -->"

WEIGHT, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes a parameter: bf16, bf16, float32 master weight and two Adam moments
TOKENS = 4096  # of one micro-batch
RUNTIME = 3e9  # CUDA context, NCCL buffers, temporary buffers of the engine
USABLE = 0.92  # of a GPU's memory; the rest is lost to fragmentation


@dataclass(frozen=True)
class Model:
    """A model in the numbers that memory depends on."""

    name: str
    width: int
    layers: int
    vocabulary: int
    parameters: float

    @classmethod
    def llama(cls, name: str, width: int, layers: int, heads: int, mlp: int, vocabulary: int, tied: bool) -> Model:
        """A decoder of the Llama family with eight key-value heads."""
        config: dict[str, Any] = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
        }
        transformer = ModelShape.from_config(config).transformer
        assert transformer is not None
        embedding = 0 if tied else vocabulary * width
        return cls(
            name, width, layers, vocabulary, transformer.weights_without_vocabulary + vocabulary * width + embedding
        )

    @property
    def activations(self) -> float:
        """Bytes with activation checkpointing: the layers' inputs, one layer, logits in bf16 and twice in float32."""
        layer_inputs = 2 * self.layers * TOKENS * self.width
        return layer_inputs + 34 * TOKENS * self.width + (2 + 4 + 4) * TOKENS * self.vocabulary

    @property
    def gathered(self) -> float:
        """Bytes of whole weights that a rank holds for a moment at stage 3: two layers, or the embedding."""
        layer = (self.parameters - 2 * self.vocabulary * self.width) / self.layers
        return WEIGHT * max(2 * layer, self.vocabulary * self.width)


MODELS = (
    Model.llama("1B", 2048, 16, 32, 8192, 128_256, True),
    Model.llama("3B", 3072, 28, 24, 8192, 128_256, True),
    Model.llama("8B", 4096, 32, 32, 14_336, 128_256, False),
    Model.llama("14B", 5120, 48, 40, 13_824, 152_064, False),
    Model.llama("32B", 5120, 64, 40, 27_648, 152_064, False),
    Model.llama("70B", 8192, 80, 64, 28_672, 128_256, False),
    Model.llama("405B", 16_384, 126, 128, 53_248, 128_256, False),
)
MACHINES = ((1, 24), (1, 80), (8, 24), (8, 48), (8, 80), (8, 141), (64, 80), (512, 80))  # GPUs, GB of each


def states(parameters: float, stage: int, ranks: int, offload: bool = False) -> tuple[float, float]:
    """Bytes of weights, gradients and optimizer states of a rank: on the GPU, and on the host (``offload``)."""
    optimizer = OPTIMIZER * parameters / (ranks if stage >= 1 else 1)
    gradients = GRADIENT * parameters / (ranks if stage >= 2 else 1)
    weights = WEIGHT * parameters / (ranks if stage >= 3 else 1)
    if not offload:
        return weights + gradients + optimizer, 0.0
    if stage < 3:
        return weights + gradients, optimizer
    return 0.0, weights + gradients + optimizer  # weights offloaded, too


def needed(model: Model, stage: int, ranks: int, offload: bool = False) -> float:
    """Bytes of GPU memory of a rank, all counted."""
    on_gpu, _ = states(model.parameters, stage, ranks, offload)
    return on_gpu + model.activations + (model.gathered if stage == 3 else 0) + RUNTIME


def choice(model: Model, ranks: int, memory: float) -> str:
    """The first way that fits, the fastest first: stages 0 to 3, then offload at stage 2 and 3."""
    stages = (0,) if ranks == 1 else (1, 2, 3)
    ways = [(stage, False) for stage in stages] + [(2, True), (3, True)]
    for stage, offload in ways:
        if needed(model, stage, ranks, offload) <= USABLE * memory * 1e9:
            host = states(model.parameters, stage, ranks, offload)[1]
            return f"{stage} + CPU ({host * min(ranks, 8) / 1e9:,.0f} GB)" if offload else str(stage)
    return "-"


def tables() -> str:
    """Both tables as Markdown."""
    head = [f"{ranks} x {memory} GB" for ranks, memory in MACHINES]
    lines = [f"| model | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for model in MODELS:
        lines.append(f"| {model.name} | {' | '.join(choice(model, *machine) for machine in MACHINES)} |")
    lines += ["", "| model | parameters | 0 | 1 | 2 | 3 | 3 + CPU | activations |", "|---|---|---|---|---|---|---|---|"]
    for model in MODELS:
        cells = [f"{needed(model, stage, 8) / 1e9:,.0f} GB" for stage in range(4)]
        cells += [f"{needed(model, 3, 8, True) / 1e9:,.0f} GB", f"{model.activations / 1e9:,.0f} GB"]
        lines.append(f"| {model.name} | {model.parameters / 1e9:.2f} billion | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """``text`` of the page with the tables of today."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables())
