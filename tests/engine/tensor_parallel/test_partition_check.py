"""Models that cannot be partitioned raise an error before any process group exists."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.models import PlainLanguageModel, tiny_llama
from tests.support.tensor_models import FAMILIES, MIXER_CUT, Mixer, llama_like, of_family


def _must_not_start(*arguments: Any) -> None:
    raise AssertionError("a process group was started")


def refusal(
    make_model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensor_parallel: dict[str, Any] | None = None,
    **arguments: Any,
) -> str:
    """What the Trainer says; empty where it would run."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ds_trainer.training.startup.process_setup.start_process_group", _must_not_start)
    deepspeed = {"tensor_parallel": tensor_parallel} if tensor_parallel else None
    args = TrainingArguments(str(tmp_path), tensor_parallel_size=2, use_cpu=True, deepspeed=deepspeed, **arguments)
    try:
        Trainer(make_model(), args)
    except ConfigError as error:
        return str(error)
    return ""


def _specs(*specs: tuple[str, str], **more: Any) -> dict[str, Any]:
    rows = [{"patterns": [pattern], "partition_type": kind} for pattern, kind in specs]
    return {"partition_config": {"layer_specs": rows, **more}}


def _lora(family: str, **more: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **more)
    model: nn.Module = peft.get_peft_model(FAMILIES[family](), adapters)
    return model


_GPT2 = partial(of_family, "GPT2", "GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=2)

INVALID: dict[str, tuple[Any, dict[str, Any] | None, dict[str, Any], str]] = {
    "a style that DeepSpeed does not know": (
        partial(llama_like, "Phi3", num_key_value_heads=2),
        None,
        {},
        r"rowwise_split_input, which DeepSpeed does not support. .*partition_config",
    ),
    "no plan": (PlainLanguageModel, None, {}, "PlainLanguageModel has no plan for tensor parallelism"),
    "no plan, and a family that is not known": (_GPT2, None, {}, "GPT2LMHeadModel has no plan"),
    "names that match nothing": (
        tiny_llama,
        _specs(("nothing", "row")),
        {},
        "no layer name of LlamaForCausalLM matches",
    ),
    "not a linear layer": (_GPT2, _specs((r".*c_fc\.weight", "column")), {}, "mlp.c_fc of GPT2LMHeadModel is a Conv1D"),
    "strict mode": (
        tiny_llama,
        _specs((r".*up_proj\.weight", "column"), strict_mode=True),
        {},
        "strict_mode is on, but partition_config has no rule for model.layers.0.self_attn.q_proj.weight",
    ),
    "an unknown preset": (
        tiny_llama,
        {"preset_model": "lama"},
        {},
        "preset_model=.lama. .*is not one of .*: llama, bloom",
    ),
    "an unknown kind": (tiny_llama, _specs((".*", "diagonal")), {}, "diagonal"),
    "adapters, partitioned by name": (partial(_lora, "opt"), None, {}, "wrapped by an adapter library"),
    "adapters, partitioned by plan": (
        partial(_lora, "qwen2", use_dora=True),
        None,
        {},
        "q_proj of PeftModel.* only LoRA around a plain layer",
    ),
    "adapters with dropout": (partial(_lora, "qwen2", lora_dropout=0.1), None, {}, "without dropout and DoRA"),
    "no head": (Mixer, {**MIXER_CUT["tensor_parallel"], "vocab_parallel_lm_head": True}, {}, "Mixer has 0 such layers"),
    "layers dropped at random": (
        partial(of_family, "OPT", "OPTForCausalLM", hidden_size=32, num_attention_heads=4, layerdrop=0.1),
        None,
        {},
        "layerdrop=0.1 .*drops layers at random",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_partition_plan_is_rejected(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model, tensor_parallel, arguments, message = INVALID[case]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refusal(make_model, tmp_path, monkeypatch, tensor_parallel, **arguments))


@pytest.mark.parametrize("case", FAMILIES)
def test_known_model_families_are_accepted(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(FAMILIES[case], tmp_path, monkeypatch) == ""


@pytest.mark.parametrize(
    "settings",
    [
        {"preset_model": "llama"},
        {"vocab_parallel_lm_head": True},
        {"vocab_parallel_lm_head": False},
        {"tp_overlap_comm": True},
        _specs((r".*up_proj\.weight", "column"), (r".*down_proj\.weight", "row")),
    ],
    ids=["preset", "head", "no head", "overlap", "own"],
)
def test_the_tensor_parallel_section_reaches_deepspeed(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(tiny_llama, tmp_path, monkeypatch, settings) == ""
