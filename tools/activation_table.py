"""Writes ``ds_trainer/planner/activations/table.json``: formulas of activations of the model families in transformers.

    python tools/activation_table.py            compare with the file; exit code 1 if it differs
    python tools/activation_table.py --write    replace it

Each entry is a run of a tiny model (``ds_trainer/planner/activations/probe.py``) for a family, an attention
implementation and a number format. What cannot run is left out, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ds_trainer.planner.activations.probe import EXPERTS, SIZES, probe
from ds_trainer.planner.activations.table import TABLE, as_json
from ds_trainer.planner.parameters.decoders import DECODERS
from ds_trainer.planner.transformer_shape import EXPERT_DECODERS

FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}
ATTENTIONS = ("sdpa", "eager")


def tiny(family: str, attention: str, dtype: torch.dtype, sizes: dict[str, int]) -> nn.Module:
    """A model of two layers with these sizes."""
    import transformers

    values: dict[str, Any] = {
        "hidden_size": sizes["hidden"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["key_heads"],
        "intermediate_size": sizes["inner"],
        "ffn_dim": sizes["inner"],
        "n_inner": sizes["inner"],
        "head_dim": sizes["queries"] // sizes["heads"],
        "num_hidden_layers": 2,
        "vocab_size": sizes["vocabulary"],
        "max_position_embeddings": 128,
        "word_embed_proj_dim": sizes["hidden"],
        "rotary_dim": 8,
        **{"num_experts": sizes.get("experts"), "num_local_experts": sizes.get("experts")},
        **{"num_experts_per_tok": sizes.get("active"), "moe_intermediate_size": sizes["inner"]},
        "shared_expert_intermediate_size": sizes["inner"],
        "attention_types": [[["global", "local"], 1]],
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    known = transformers.AutoConfig.for_model(family)
    given = {name: value for name, value in values.items() if hasattr(known, name) and value is not None}
    config = transformers.AutoConfig.for_model(family, **given, attn_implementation=attention)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()


def entries() -> Iterator[tuple[str, Any]]:
    """The key of each entry and its value."""
    for family in sorted(DECODERS):
        for attention in ATTENTIONS:
            for name, dtype in FORMATS.items():
                key = f"{family} {attention} {name}"
                problem = None
                for sizes in _sizes(family):
                    try:
                        model = tiny(family, attention, dtype, sizes)
                        layers = next(
                            module
                            for module in model.modules()
                            if isinstance(module, nn.ModuleList) and len(module) == 2
                        )
                        yield key, as_json(probe(model, layers, sizes))
                        break
                    except (ValueError, RuntimeError) as error:
                        problem = str(error).splitlines()[0][:150]
                else:
                    print(f"{key}: left out: {problem}", file=sys.stderr)


def _layers(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 2)


def _sizes(family: str) -> Iterator[dict[str, int]]:
    sizes = {**SIZES, **(EXPERTS if family in EXPERT_DECODERS else {})}
    yield sizes
    equal = {**sizes, "queries": sizes["hidden"], "keys": sizes["hidden"], "key_heads": sizes["heads"]}
    yield equal  # heads share the hidden width
    yield {**equal, "inner": 4 * sizes["hidden"]}  # no choice of the inner width


def main() -> int:
    """Compare or write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = dict(entries())
    text = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()) + "\n}\n"
    if options.write:
        TABLE.write_text(text, encoding="utf-8")
        return 0
    same = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
    print(f"{TABLE.name} is {'up to date' if same else 'old: run tools/activation_table.py --write'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
