"""The probe on the CPU: real runs with counted allocations, beside the formulas; and what it corrects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_trainer.planner.activations import device_probe
from ds_trainer.planner.activations.device_probe import describe, predicted_layer, probe_device
from ds_trainer.planner.activations.probed import Probe
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.estimate import FRAGMENTATION, estimate_memory
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.utils.errors import ConfigError

transformers = pytest.importorskip("transformers")

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "vocab_size": 640},
    **{"num_hidden_layers": 12, "max_position_embeddings": 512},
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    values = {**SIZES, **changes}
    found: dict[str, Any] = transformers.AutoConfig.for_model(family, **values).to_dict()
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("number_format", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_it_agrees_with_the_table(family: str, number_format: str) -> None:
    config = config_of(family, num_key_value_heads=2)
    model = PlannedModel.from_config(config)
    probe = probe_device(model, config, "cpu", number_format)
    assert probe.layer[1] == pytest.approx(predicted_layer(model, probe), rel=0.02)
    assert probe.loss == pytest.approx(1, abs=0.03)
    assert "the CPU" in describe(model, probe) and probe.context is None


def test_it_corrects_a_family_that_the_table_lacks() -> None:
    """GPT-J's attention and MLP read the same normalized input, so a layer keeps less than one of Llama."""
    config = config_of("gptj", n_embd=128, n_layer=12, n_head=8, n_positions=512, rotary_dim=16)
    model = PlannedModel.from_config(config)
    assert model.activations("sdpa", "bf16")[1] == "llama"
    probe = probe_device(model, config, "cpu")
    assert abs(probe.layer[1] / predicted_layer(model, probe) - 1) > 0.05
    run = Candidate(1, 128, stage=0, micro_batch=4)
    kept = estimate_memory(replace(model, probe=probe), run).batch.kept
    assert kept == pytest.approx(12 * 4 * 128 * probe.layer_at(128))
    other = replace(run, precision="fp32")  # was not measured
    assert estimate_memory(replace(model, probe=probe), other) == estimate_memory(model, other)


def test_a_line_through_two_lengths() -> None:
    """Scores make the bytes of a token grow with the length; a smaller change than 1 % is noise."""
    probe = Probe("gpu", "sdpa", "bf16", (1000, 2000), (100.0, 140.0))
    assert [probe.layer_at(length) for length in (1000, 2000, 11000)] == [100, 140, 500]
    assert replace(probe, layer=(100.0, 100.5)).layer_at(10**6) == 100.5


def test_slack_of_a_gpu_replaces_the_rules_of_thumb() -> None:
    config = config_of("llama")
    model, run = PlannedModel.from_config(config), Candidate(1, 128, stage=0)
    before = estimate_memory(model, run)
    layer = before.batch.kept / 12 / 128
    probe = Probe("gpu", "sdpa", "bf16", (64, 128), (layer, layer), context=2e9, fragmentation=0.1)
    found = estimate_memory(replace(model, probe=probe), run)
    assert found.tensors == pytest.approx(before.tensors)
    assert found.device - before.device == pytest.approx(2e9 - 0.6e9 + (0.1 - FRAGMENTATION) * found.tensors)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_fake_tensors_count_like_real_ones(family: str) -> None:
    """Besides the sizes of tensors nothing of a run matters, so 8B are measured in seconds."""
    config = config_of(family, num_key_value_heads=2)
    model = PlannedModel.from_config(config)
    fake, real = (device_probe._probed(model, config, kind, "bf16", 1, 0.0) for kind in ("fake", "cpu"))
    assert fake.layer == pytest.approx(real.layer, rel=0.002)
    assert fake.loss == pytest.approx(real.loss, rel=0.01)


def test_8b_within_a_minute() -> None:
    config = config_of("llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                       num_key_value_heads=8, vocab_size=128256, num_hidden_layers=32)  # fmt: skip
    model = PlannedModel.from_config(config)
    probe = probe_device(model, config, "cpu")
    assert probe.seconds < device_probe.LIMIT
    assert probe.layer[1] == pytest.approx(predicted_layer(model, probe), rel=0.01)


def test_real_tensors_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "LIMIT", 0.0)
    config = config_of("llama")
    with pytest.raises(ConfigError, match="on this CPU the runs of the model would take about"):
        device_probe._probed(PlannedModel.from_config(config), config, "cpu", "bf16", 1, 0.0)


def test_refusals() -> None:
    config = transformers.AutoConfig.for_model("t5", d_model=64, d_kv=8, d_ff=128, num_layers=2, num_heads=8).to_dict()
    with pytest.raises(ConfigError, match="several stacks of layers"):
        probe_device(PlannedModel.from_config(config), config, "cpu")
    config = config_of("llama")
    wrong = replace(PlannedModel.from_config(config), transformer=PlannedModel.from_config(
        config_of("llama", hidden_size=16, intermediate_size=8)).transformer)  # fmt: skip
    with pytest.raises(ConfigError, match="This is no correction"):
        probe_device(wrong, config, "cpu")
