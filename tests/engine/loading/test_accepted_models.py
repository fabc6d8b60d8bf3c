"""What models on meta may be, and what is refused: optimizers over them, evaluation before training, no source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine.loading.parameter_data import set_data
from ds_trainer.engine.loading.weight_source import attached_weight_source
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal
from tests.support.loading import on_meta
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import compatibility_of, whole_weights
from tests.support.scalar_models import Scalars


def test_a_parameter_on_meta_keeps_its_identity_attributes_and_hooks() -> None:
    layer = nn.GRU(3, 4)  # holds weak references to its weights
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(parameter.detach().to("meta")))
    weight: Any = layer.weight_ih_l0
    weight.mark = "kept"
    handle = weight.register_hook(lambda gradient: gradient * 3)
    seen: list[Any] = []
    weight.register_post_accumulate_grad_hook(seen.append)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    set_data(weight, torch.ones(12, 3))
    assert layer.weight_ih_l0 is weight is optimizer.param_groups[0]["params"][0]
    assert weight.mark == "kept"
    assert not weight.is_meta
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.full((12, 3), 3.0))
    assert seen[0] is weight
    handle.remove()
    weight.grad = None
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones(12, 3))


def arguments(directory: str, **more: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        logging_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True, max_steps=2, weight_decay=0.1
    )
    return TrainingArguments(directory, **{**values, **more})


def trained(directory: str, model: nn.Module, **more: Any) -> Trajectory:
    trainer = Trainer(model, arguments(directory, **more), train_dataset=RaggedTokens(32))
    trainer.train()
    found = compatibility_of(trainer)
    trainer.engine.close()
    return found


WAYS: dict[str, dict[str, Any]] = {
    "fused AdamW, ZeRO 3": {"zero_stage": 3, "optim": "adamw_torch_fused"},
    "fused AdamW, ZeRO 0": {"zero_stage": 0, "optim": "adamw_torch_fused"},
    "Adafactor, noise": {"zero_stage": 0, "optim": "adafactor", "neftune_noise_alpha": 0.1},
    **{f"Adagrad, ZeRO {stage}": {"zero_stage": stage, "optim": "adagrad"} for stage in (0, 1, 2, 3)},
    "bf16, ZeRO 0": {"zero_stage": 0, "bf16": True},
    "bf16, ZeRO 3": {"zero_stage": 3, "bf16": True},
    "recomputed": {"zero_stage": 3, "gradient_checkpointing": True},
}


def pairs_of_runs(directory: str) -> dict[str, Any]:
    """Every way twice: the model handed in, and on meta."""
    return {
        name: [trained(directory, model, **way) for model in (tiny_llama(), on_meta(tiny_llama()))]
        for name, way in WAYS.items()
    }


@pytest.mark.extended
def test_every_optimizer_can_be_built_for_a_model_on_the_meta_device(tmp_path: Path) -> None:
    for rank in pool(2).run(pairs_of_runs, str(tmp_path), timeout=600):
        for handed_in, on_meta_ in rank.values():
            assert_equal(on_meta_, handed_in, tolerance=1e-6)


def evaluated_then_trained(directory: str, **more: Any) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The loss before training, that of the first step of an engine, and the weights that the second engine took."""
    trainer = Trainer(on_meta(tiny_llama()), arguments(directory, learning_rate=0.0, optim="sgd", **more),
                      train_dataset=RaggedTokens(16))  # fmt: skip
    before = trainer.evaluate(RaggedTokens(16))["eval_loss"]
    trainer.train()
    weights = whole_weights(trainer)
    trainer.engine.close()
    if "tensor_parallel_size" in more:
        return before, before, weights  # a second Trainer does not take slices
    second = Trainer(trainer.model, arguments(directory, learning_rate=0.0, optim="sgd", **more),
                    train_dataset=RaggedTokens(16))  # fmt: skip
    after = second.evaluate(RaggedTokens(16))["eval_loss"]
    return before, after, weights


def engines_in_turn(directory: str) -> dict[str, Any]:
    offload = {"deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}}
    return {
        "ZeRO 3": evaluated_then_trained(directory, zero_stage=3),
        "ZeRO 3, offloaded": evaluated_then_trained(directory, zero_stage=3, **offload),
        "ZeRO 0": evaluated_then_trained(directory, zero_stage=0),
        "tp": evaluated_then_trained(directory, zero_stage=1, tensor_parallel_size=2),
    }


def test_evaluation_before_training_leaves_the_model_for_the_next_engine(tmp_path: Path) -> None:
    wanted = dict(tiny_llama().named_parameters())
    for rank in pool(2).run(engines_in_turn, str(tmp_path), timeout=600):
        for name, (before, after, weights) in rank.items():
            assert before == pytest.approx(after, rel=1e-6), name
            assert before == pytest.approx(rank["ZeRO 0"][0], rel=1e-5), name
            for parameter, weight in wanted.items():
                assert torch.equal(weights[parameter], weight.detach()), (name, parameter)


def scalars_and_buffers(directory: str, stage: int) -> dict[str, torch.Tensor]:
    """What a model of odd parameters and persistent buffers holds in an engine that was made of it on meta."""
    model = on_meta(Scalars())
    rows = [{"x": torch.ones(6), "labels": torch.tensor(1.0)}] * 16
    args = arguments(directory, zero_stage=stage, optim="sgd", learning_rate=0.0, max_steps=1)
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train()
    found = {**whole_weights(trainer), "offset": model.get_buffer("offset").clone()}
    trainer.engine.close()
    return found


def test_scalars_and_buffers_are_filled_from_the_weight_source(tmp_path: Path) -> None:
    wanted = {**dict(Scalars().named_parameters()), "offset": torch.tensor(0.25)}
    for stage in (1, 3):
        for found in pool(2).run(scalars_and_buffers, str(tmp_path), stage):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert torch.equal(found[name], value.detach()), name


def refusals(directory: str) -> list[str]:
    messages = []
    for stage, name in ((3, None), (1, None), (3, "lm_head.weight"), (0, "buffer")):
        model = on_meta(tiny_llama())
        source: Any = attached_weight_source(model)
        if name == "buffer":
            model.model.register_buffer("lost", torch.empty(3, device="meta"))  # type: ignore[operator, union-attr]
        elif name is None:
            source.tensors.clear()
        else:
            del source.tensors[name]
        with pytest.raises(ConfigError) as caught:
            trained(directory, model, zero_stage=stage)
        messages.append(str(caught.value))
    return messages


def test_a_model_with_unknown_weights_is_rejected(tmp_path: Path) -> None:
    for everything, below, one, buffer in pool(2).run(refusals, str(tmp_path)):
        for text in (everything, below):
            assert "21 parameters of LlamaForCausalLM are on the meta device" in text
            assert "model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight" in text
            assert "from_pretrained" in text
        assert "1 parameters of LlamaForCausalLM are on the meta device" in one
        assert "lm_head.weight" in one
        assert "buffers of LlamaForCausalLM are on the meta device" in buffer
        assert "model.lost" in buffer


def on_disk(extensions: str, directory: str) -> list[Trajectory]:
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    nvme = {"device": "nvme", "nvme_path": f"{directory}/nvme", "buffer_count": 8, "buffer_size": 100_000}
    Path(directory, "nvme").mkdir(exist_ok=True)
    config = {"zero_optimization": {"offload_param": nvme, "stage3_param_persistence_threshold": 0}}
    models = (tiny_llama(), on_meta(tiny_llama()))
    return [
        trained(directory, tiny_llama(), zero_stage=3, optim="sgd"),
        *(trained(directory, model, zero_stage=3, optim="sgd", deepspeed=config) for model in models),
    ]


@pytest.mark.extended
@pytest.mark.jit
@pytest.mark.needs("libaio.h")
def test_weights_offloaded_to_disk_train_alike(extensions: str, tmp_path: Path) -> None:
    for in_memory, handed_in, lazily in pool(2).run(on_disk, extensions, str(tmp_path), timeout=900):
        assert_equal(handed_in, in_memory)
        assert_equal(lazily, in_memory)
