"""ModelShape: widths from configurations of many names."""

from __future__ import annotations

import pytest
from torch import nn

from ds_trainer.planner.model_shape import ModelShape
from tests.support.models import tiny_llama


@pytest.mark.parametrize("name", ["hidden_size", "d_model", "n_embd", "dim"])
def test_width_under_each_of_its_names(name: str) -> None:
    assert ModelShape.from_config({name: 48}) == ModelShape(48, f"model config.{name}=48")


def test_composite_configuration_gives_the_largest_part() -> None:
    shape = ModelShape.from_config({"text_config": {"hidden_size": 64}, "vision_config": {"hidden_size": 96}}, "m")
    assert shape == ModelShape(96, "m.vision_config.hidden_size=96")


def test_models_with_and_without_configuration() -> None:
    assert ModelShape.from_model(tiny_llama()).hidden_size == 32
    assert ModelShape.from_model(nn.Linear(2, 2)) == ModelShape(None, "unknown", total=6, trainable=6)
