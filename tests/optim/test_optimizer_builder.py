"""Parameter groups and the optimizer of a configuration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_trainer import ModelShape, ParallelLayout, TrainingArguments, compile_config
from ds_trainer.optim.optimizer_builder import build_optimizer, decay_parameter_names, optimizer_class, parameter_groups
from tests.support.models import PlainLanguageModel, tiny_llama


@pytest.mark.parametrize("make_model", [tiny_llama, PlainLanguageModel])
def test_decayed_names_are_those_of_transformers(make_model, tmp_path) -> None:  # type: ignore[no-untyped-def]
    import transformers

    reference = transformers.Trainer.get_decay_parameter_names(None, make_model())  # type: ignore[arg-type]
    assert sorted(decay_parameter_names(make_model())) == sorted(reference)


def test_norms_are_found_by_class_where_the_name_does_not_say_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2))
    assert decay_parameter_names(model) == ["0.weight"]


def test_groups_hold_each_trainable_parameter_once() -> None:
    model = tiny_llama(tied=True)
    model.model.layers[0].requires_grad_(False)  # type: ignore[union-attr, index]
    groups = parameter_groups(model, decay_parameter_names(model), 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), ["weight"], 0.1)) == 1


@pytest.mark.parametrize(
    ("arguments", "cls", "expected"),
    [
        ({"optim": "adamw_torch_fused"}, torch.optim.AdamW, {"fused": True, "betas": (0.9, 0.95)}),
        ({"optim": "adamw_torch", "optim_args": "amsgrad=True"}, torch.optim.AdamW, {"amsgrad": True}),
        ({"optim": "sgd", "optim_args": "momentum=0.9"}, torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_class_and_arguments_follow_the_configuration(arguments, cls, expected) -> None:  # type: ignore[no-untyped-def]
    args = TrainingArguments("out", learning_rate=0.5, weight_decay=0.25, adam_beta2=0.95, **arguments)
    config = compile_config(args, ParallelLayout(1), ModelShape())
    found, keywords = optimizer_class(config)
    assert found is cls
    assert {**expected, "lr": 0.5, "weight_decay": 0.25}.items() <= keywords.items()
    optimizer = build_optimizer(config, [{"params": nn.Linear(2, 2).parameters()}])
    assert isinstance(optimizer, cls) and optimizer.param_groups[0]["lr"] == 0.5
