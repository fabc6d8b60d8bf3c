"""What a model keeps with activation checkpointing of 1 in so many layers, against tensors that autograd saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.micro_batch import MicroBatch, micro_batch
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.step_time import step_time
from ds_trainer.training.model.gradient_checkpointing import enable_gradient_checkpointing
from tests.planner.test_search import MODEL, NODE

transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 96


def config_of(family: str, layers: int, attention: str) -> Any:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "vocab_size": 512, "max_position_embeddings": 256}
    more = {} if family == "gpt2" else {"num_key_value_heads": 2, "intermediate_size": 320}
    return transformers.AutoConfig.for_model(
        family,
        **{**sizes, **more},
        num_hidden_layers=layers,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=attention,
    )


def saved_bytes(family: str, layers: int, attention: str, every: int) -> int:
    """Bytes that autograd keeps, without weights and buffers."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, layers, attention), dtype=torch.bfloat16)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if every:
        enable_gradient_checkpointing(model, {"every_n_layers": every})
    ignored = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored:
            found[storage._cdata] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 512, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(found.values())


def planned(family: str, layers: int, attention: str, every: int) -> MicroBatch:
    model = PlannedModel.from_config(config_of(family, layers, attention).to_dict())
    layers_of = {"checkpointing": every > 0, "every_n_layers": max(1, every)}
    return micro_batch(model, Candidate(1, LENGTH, micro_batch=BATCH, attention=attention, **layers_of))


@pytest.mark.cases(6)
@pytest.mark.parametrize("every", [0, 1, 2, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kept_bytes(family: str, attention: str, every: int) -> None:
    more, fewer = 7, 2  # 1 in 3 of 7 layers are 3, of 2 layers 1
    wanted = saved_bytes(family, more, attention, every) - saved_bytes(family, fewer, attention, every)
    found = planned(family, more, attention, every).kept - planned(family, fewer, attention, every).kept
    assert found == pytest.approx(wanted, rel=0.05)
    other = planned(family, more, attention, every + 1).kept - planned(family, fewer, attention, every + 1).kept
    assert other != pytest.approx(wanted, rel=0.05)  # the number matters


def test_the_last_layer_decides_about_what_is_recomputed_first() -> None:
    """1 in 2 of 6 layers: the last one keeps its own. Of 7 it is recomputed, when all others exist."""
    assert planned("llama", 6, "sdpa", 2).recomputed_last == 0
    assert planned("llama", 7, "sdpa", 2).recomputed_last == planned("llama", 7, "sdpa", 2).recomputed > 0


def test_time_is_between_none_and_all() -> None:
    times = [
        step_time(MODEL, Candidate(8, 8192, checkpointing=every > 0, every_n_layers=max(1, every)), NODE).seconds
        for every in (0, 4, 2, 1)
    ]
    assert times == sorted(times) and times[0] < times[1]
    middle = (times[0] + times[3]) / 2
    assert times[2] == pytest.approx(middle, rel=0.01)
