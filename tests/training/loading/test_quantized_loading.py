"""LoRA on bases that bitsandbytes keeps in 4 or 8 bits: the numbers of plain PyTorch, or a refusal in words."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from ds_trainer import ConfigError, Trainer, TrainingArguments, from_pretrained
from ds_trainer.engine.quantized_weights import (
    disable_cpu_repacking,
    is_packed_for_inference,
    quantized_parameters,
    represented_numel,
)
from tests.support.compare import assert_equal, distances, relative
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import compatibility_of

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

SEED = 42  # of TrainingArguments
make_data = partial(RaggedTokens, 64)
KINDS: dict[str, dict[str, Any]] = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "4 bits twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "8 bits": {"load_in_8bit": True},
}


def lora() -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def of_transformers(directory: str, kind: str | None) -> Any:
    """By the library itself; ``kind`` None where the files are quantized."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    keywords = {} if kind is None else {"quantization_config": BitsAndBytesConfig(**KINDS[kind])}
    return AutoModelForCausalLM.from_pretrained(directory, **keywords)


def adapted(model: Any) -> nn.Module:
    torch.manual_seed(SEED)
    made: nn.Module = peft.get_peft_model(model, lora())
    return made.train()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose layers bitsandbytes' CPU kernel for inference would take."""
    where = tmp_path_factory.mktemp("base")
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(where)  # type: ignore[operator]
    return str(where)


@pytest.fixture(scope="module")
def quantized_directory(directory: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("quantized")
    of_transformers(directory, "4 bits twice").save_pretrained(where)
    return str(where)


@cache
def oracle(directory: str, kind: str | None) -> Trajectory:
    found = train_plainly(adapted(of_transformers(directory, kind)), make_data())
    return replace(found, weights={name: weight.float() for name, weight in found.weights.items()})


def arguments(output_dir: Path, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.0,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=8,
    )
    return TrainingArguments(str(output_dir), **{**values, **changes})


def named(output_dir: Path, directory: str, kind: str | None, **changes: Any) -> Trainer:
    """The model by its directory."""
    keywords = {"quantization_config": {"quant_method": "bitsandbytes", **KINDS[kind]}} if kind else None
    args = arguments(output_dir, model_init_kwargs=keywords, **changes)
    return Trainer(directory, args, train_dataset=make_data(), eval_dataset=make_data(), peft_config=lora())


def train(output_dir: Path, directory: str, cases: list[Any]) -> list[tuple[Trajectory, str]]:
    """On a rank: a run for each way, kind and stage; with what the check of the weights said."""
    found = []
    micro = 16 // int(os.environ["WORLD_SIZE"])
    for way, kind, stage in cases:
        changes = {"zero_stage": stage, "per_device_train_batch_size": micro}
        if way == "named":
            job = named(output_dir, directory, kind, **changes)
        else:
            model, config = of_transformers(directory, kind), lora()
            if way == "adapted":
                model, config = adapted(model), None
            job = Trainer(model, arguments(output_dir, **changes), train_dataset=make_data(), peft_config=config)
        job.train()
        found.append((compatibility_of(job), str(job._ds_trainer.engines.weight_check.summary)))
        job.engine.close()
    return found


CASES: dict[int, list[tuple[str, str | None, int]]] = {
    1: [("named", "4 bits", 1), ("loaded", "8 bits", 0)],
    2: [
        *(("named", kind, stage) for kind in ("4 bits", "8 bits") for stage in (0, 1, 2)),
        ("named", "4 bits twice", 2),
        ("loaded", "4 bits", 2),
        ("adapted", "4 bits", 1),
        ("adapted", "8 bits", 2),
    ],
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("world", CASES)
def test_losses_are_those_of_plain_pytorch(world: int, directory: str, tmp_path: Path) -> None:
    for reports in pool(world).run(partial(train, tmp_path, directory, CASES[world])):
        for (report, message), (way, kind, stage) in zip(reports, CASES[world], strict=True):
            wanted = oracle(directory, kind)
            differences = distances(report, wanted)
            # Adam divides by the size of a gradient: of adapters that begin at zero, rounding shows more in weights.
            assert differences.pop("weights") < 1e-4 and max(differences.values()) < 2e-5, (
                way,
                kind,
                stage,
                distances(report, wanted),
            )
            packed = [name for name in wanted.weights if "base_layer" in name]
            assert len(packed) == 14 and all(torch.equal(report.weights[n], wanted.weights[n]) for n in packed)
            assert message.startswith("verified, 7 of 21") and "14 not compared" in message, (way, kind, stage, message)
    other = oracle(directory, "8 bits" if kind == "4 bits" else "4 bits")  # negative control
    assert relative(report.losses, other.losses) > 2e-5


def stop_and_resume(output_dir: Path, directory: str, stage: int) -> list[Any]:
    """On a rank: a full run with evaluations, and its second half resumed; then the same on another base."""
    keeps = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    found = []
    for checkpoint in (None, str(output_dir / "checkpoint-2")):
        job = named(output_dir, directory, None, zero_stage=stage, **(keeps if checkpoint is None else {}))
        job.train(resume_from_checkpoint=checkpoint)
        losses = [entry["eval_loss"] for entry in job.state.log_history if "eval_loss" in entry]
        found.append((compatibility_of(job), job._ds_trainer.engines.weight_check.summary, losses))
        logits = logits_of(job.model)
        job.engine.close()
    other = named(output_dir, directory, None, zero_stage=stage)
    with torch.no_grad():
        next(iter(quantized_parameters(other.model).values())).data.add_(1)
    with pytest.raises(ConfigError) as refused:
        other.train(resume_from_checkpoint=str(output_dir / "checkpoint-2"))
    return [*found, logits, str(refused.value)]


def logits_of(model: nn.Module) -> torch.Tensor:
    disable_cpu_repacking(model.eval())
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(3, 15)[None]).logits
    return found


def test_a_resumed_run_is_the_same(quantized_directory: str, tmp_path: Path) -> None:
    """Files that are quantized already are compared, and checkpoints hold the adapters and a digest of the base."""
    reports = pool(2).run(partial(stop_and_resume, tmp_path, quantized_directory, 2))
    for uninterrupted, resumed, _, refused in reports:
        assert resumed[0].losses == uninterrupted[0].losses and resumed[0].grad_norms == uninterrupted[0].grad_norms
        assert [n for n, w in uninterrupted[0].weights.items() if not torch.equal(w, resumed[0].weights[n])] == []
        assert uninterrupted[1].startswith("verified, 21 of 21 tensors, 0 missing, 0 unexpected")
        assert len(uninterrupted[2]) == 4 and len(set(uninterrupted[2])) == 4
        assert "1 of 21 frozen tensors differ" in refused and "Load the model that the adapters" in refused
    checkpoint = tmp_path / "checkpoint-4"
    assert {path.name for path in checkpoint.glob("*model*.safetensors")} == {"adapter_model.safetensors"}
    described = json.loads((checkpoint / "base.json").read_text())
    assert described["model"] == quantized_directory and len(described["tensors"]) == 21
    saved_keys = [key for path in checkpoint.glob("*.safetensors") for key in safe_open(path, "pt").keys()]  # noqa: SIM118
    assert saved_keys and all("lora_" in key for key in saved_keys)
    served = peft.PeftModel.from_pretrained(of_transformers(quantized_directory, None), str(checkpoint))
    assert torch.equal(logits_of(served), reports[0][2])
    plain = oracle(quantized_directory, None)  # and evaluations in between change nothing
    assert_equal(reports[0][0][0], plain, 2e-5)


def test_an_evaluation_does_not_repack_the_base(directory: str) -> None:
    from bitsandbytes.functional import has_avx512bf16

    kept, control = of_transformers(directory, "4 bits"), of_transformers(directory, "4 bits")
    before = {name: parameter.clone() for name, parameter in quantized_parameters(kept).items()}
    logits_of(kept)
    assert all(torch.equal(parameter, before[name]) for name, parameter in quantized_parameters(kept).items())
    with torch.no_grad():
        control.eval()(input_ids=torch.arange(3, 15)[None])
    packed = [is_packed_for_inference(parameter) for parameter in quantized_parameters(control).values()]
    assert packed == [has_avx512bf16()] * 14
    if has_avx512bf16():  # what was done to it before it is handed in
        with pytest.raises(ConfigError, match=r"repacked for a CPU inference kernel.*Load the model again"):
            Trainer(control, arguments(Path("out")), train_dataset=make_data(), peft_config=lora())


def test_from_pretrained_loads_quantized_weights(directory: str, quantized_directory: str, tmp_path: Path) -> None:
    for where, keywords in ((directory, {"load_in_4bit": True}), (directory, {"load_in_8bit": True})):
        model = from_pretrained(where, peft_config=lora(), **keywords)  # type: ignore[arg-type]
        frozen = sum(represented_numel(p) for p in model.parameters() if not p.requires_grad)
        assert frozen == sum(p.numel() for p in tiny_llama(hidden_size=64, intermediate_size=128).parameters())
        assert model.get_base_model().name_or_path == where and len(quantized_parameters(model)) == 14
    made = adapted(of_transformers(quantized_directory, None))
    made.save_pretrained(str(tmp_path))  # type: ignore[operator]
    reloaded = from_pretrained(tmp_path)  # adapters that were saved, and the base that they name
    assert torch.equal(logits_of(reloaded), logits_of(made)) and len(quantized_parameters(reloaded)) == 14
    assert any(parameter.requires_grad for parameter in reloaded.parameters())


# -- refusals ----------------------------------------------------------------------------------------------------------

FOUR = {"quantization_config": {"load_in_4bit": True}}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ZeRO 3": (FOUR, {"zero_stage": 3}, "4-bit weights of bitsandbytes.*ZeRO stage 3 shards weights.*zero_stage to 2"),
    "tensor parallelism": (FOUR, {"tensor_parallel_size": 2}, "=2 partitions layers.*Set tensor_parallel_size=1"),
    "stored as fractions": (
        {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_storage": "float16"}},
        {"bf16": True},
        r"elements of torch.float16 .bnb_4bit_quant_storage., which bf16=True would cast",
    ),
    "evaluated in 16 bits": (
        {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_storage": "float16"}},
        {"bf16_full_eval": True},
        "bf16_full_eval=True would cast",
    ),
    "another method": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {},
        "quantized by gptq.*load_in_4bit=True",
    ),
    "an unknown field": (
        {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_typ": "nf4"}},
        {},
        "'bnb_4bit_quant_typ' is not a field.*Did you mean 'bnb_4bit_quant_type'",
    ),
    "no bits": ({"quantization_config": {"quant_method": "bitsandbytes"}}, {}, "neither load_in_4bit nor load_in_8bit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_keywords_are_rejected(
    name: str, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keywords, changes, message = REFUSED[name]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for variable, value in ranks.items():
        monkeypatch.setenv(variable, value)
    args = arguments(tmp_path, model_init_kwargs=keywords, **changes)
    with pytest.raises(ConfigError, match=message):
        Trainer(directory, args, train_dataset=make_data(), peft_config=lora())


def test_a_quantized_base_without_adapters_is_rejected(directory: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, model_init_kwargs=FOUR)
    with pytest.raises(ConfigError, match=r"cannot be trained, and no trainable adapters.*Pass peft_config"):
        Trainer(directory, args, train_dataset=make_data())
    Trainer(directory, args, eval_dataset=make_data())  # for evaluation it needs none


def test_without_bitsandbytes_the_package_is_named(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    with pytest.raises(ConfigError, match=r"pip install bitsandbytes"):
        from_pretrained(directory, load_in_4bit=True)
