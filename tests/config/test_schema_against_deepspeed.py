"""The schema against DeepSpeedConfig as a whole: sections with and without a model, types behind defaults, remedies."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
from build_deepspeed_schema import field_at, known_limits, recorded_config
from deepspeed.runtime import config as runtime
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_trainer.config.schema import SNAPSHOT, Field, load_schema
from ds_trainer.config.user_config import read_user_config
from tests.config.support import nested

SCHEMA = load_schema()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = deepspeed.utils.logger.level
    deepspeed.utils.logger.setLevel(logging.ERROR)
    yield
    deepspeed.utils.logger.setLevel(before)


def problems(mapping: dict[str, Any]) -> list[str]:
    return SCHEMA.problems(read_user_config(mapping)[0])


def deepspeed_reads(mapping: dict[str, Any]) -> None:
    runtime.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **json.loads(json.dumps(mapping))})


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def leaves(section: Field, path: str = "") -> Iterator[tuple[str, Field]]:
    for name, field in section.fields.items():
        full = f"{path}.{name}" if path else name
        if field.kind == "section":
            yield from leaves(field, full)
        elif field.refused is None and field.replaced_by is None:
            yield full, field


LEAVES = list(leaves(SCHEMA.root))


REFUSED_BY_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"gradient_allreduce_op": "avg"}, 'gradient_allreduce_op="avg" must be one of "mean", "sum".'),
    ({"communication_data_type": "float16"}, "must be one of"),
    (zero(offload_optimizer={"device": "CPU"}), "Did you mean 'cpu'?"),
    (zero(zenflow={"select_strategy": "always"}), 'must be one of "auto", "step", "epoch".'),
    (zero(zenflow={"select_interval": "often"}), 'select_interval="often" must be a whole number.'),
    (zero(zenflow={"update_interval": 0}), "update_interval=0 must be a whole number at least 1."),
    ({"compile": {"passes": ["z1", "nope"]}}, 'compile.passes has "nope"; each entry must be one of "z1", "z3"'),
    ({"tensor_parallel": {"dtype": "bf16"}}, "takes a Python object, which a configuration cannot hold"),
    ({"tensor_parallel": {"vocab_parallel_ce_backend": "Liger"}}, "Did you mean 'liger'?"),
    ({"torch_autocast": {"enabled": True, "dtype": "BF16"}}, "Did you mean 'bf16'?"),
    ({"torch_autocast": {"lower_precision_safe_modules": [3]}}, "has 3; each entry must be a string."),
    ({"data_types": {"keep_in_fp32_modules": "norm"}}, 'must be a list. Write ["norm"].'),
    ({"checkpoint": {"writer": {"data_parallel": "rack"}}}, 'must be one of "replica", "socket", "machine".'),
    ({"expert_parallel": {"load_balance_coeff": 0.1}}, "is not supported by AutoEP; leave it out."),
    ({"weight_quantization": {"q_type": "sym"}}, 'q_type="sym" must be one of'),
]


@pytest.mark.parametrize(("mapping", "message"), REFUSED_BY_BOTH, ids=lambda value: str(value)[:60])
def test_refused_by_both(mapping: dict[str, Any], message: str) -> None:
    (problem,) = problems(mapping)
    assert message in problem
    with pytest.raises((ValueError, AssertionError, runtime.DeepSpeedConfigError)):
        deepspeed_reads(mapping)


# DeepSpeed reads these and fails later, or does nothing with them.
REFUSED_EARLIER: list[tuple[dict[str, Any], str]] = [
    ({"log_level": "loud"}, "must be one of"),
    ({"aio": {"queue_depth": 0}}, "aio.queue_depth=0 must be a whole number at least 1."),
    ({"aio": {"thread_count": 4}}, "aio.thread_count was removed from DeepSpeed. Write aio.intra_op_parallelism."),
    ({"allgather_size": 1}, "Write zero_optimization.allgather_bucket_size."),
    ({"expert_parallel": {"enabled": True, "score_func": "max"}}, "Did you mean 'softmax'?"),
    ({"data_efficiency": {"enabled": True, "data_samplin": {}}}, "Did you mean 'data_sampling'?"),
    ({"autotuning": {"enabled": True, "tuner_typ": "random"}}, "Did you mean 'tuner_type'?"),
    ({"pin_memory": True}, "zero_optimization.offload_param or zero_optimization.offload_optimizer."),
    ({"optimizer": {"type": "adamw", "params": {"eps": "1e-8"}}}, 'eps="1e-8" must be a number. Remove the quotes.'),
    ({"optimizer": {"type": "SGD", "params": {"nesterov": "yes"}}}, "Write true, without quotes."),
    ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, "betas=0.9 must be a list."),
    ({"scheduler": {"type": "WarmupDecayLR"}}, 'type="WarmupDecayLR" needs scheduler.params.total_num_steps; add it.'),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "must be a whole number at least 1."),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}, 'must be one of "log", "linear".'),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, "x"]}}},
        'warmup_max_lr="x" must be a number',
    ),
    (zero(reduce_bucket_size="200MB"), "Write a plain number, without a unit."),
    ({"dump_state": 1}, "Write true, without quotes."),
    ({"wandb": {"project": 3}}, "Put quotes around it."),
    (zero(zenflow={"steps_per_epoch": 3}), "is filled in by DeepSpeed itself; leave it out."),
]


@pytest.mark.parametrize(("mapping", "message"), REFUSED_EARLIER, ids=lambda value: str(value)[:60])
def test_refused_before_it_fails_later(mapping: dict[str, Any], message: str) -> None:
    (problem,) = problems(mapping)
    assert message in problem


def value_of(field: Field) -> st.SearchStrategy[Any]:
    """Values that ``field`` accepts."""
    if field.choices:
        choices = [str(choice).upper() if field.any_case else choice for choice in field.choices]
        return st.sampled_from([*field.choices, *choices])
    low = 1 if field.minimum is None else field.minimum
    if field.above is not None:
        low = field.above + 0.01 if field.kind == "float" else field.above + 1
    high = field.maximum if field.maximum is not None else 0.99 if field.below is not None else low + 4
    return {
        "bool": st.booleans(),
        "int": st.integers(int(low), int(high)),
        "float": st.floats(low, high),
        "str": st.text("ab", min_size=1),
        "list": st.lists(st.sampled_from(field.items.choices or ["a"]) if field.items else st.just("a"), max_size=2),
        "dict": st.just({}),
    }[field.kind]


# Judged by DeepSpeed together with other keys: the rules and the layout know about those.
TOGETHER = {
    "zero_optimization.compute_grad_norm",
    "zero_optimization.offload_optimizer.ratio",
    "data_efficiency.data_sampling.curriculum_learning.enabled",
    "data_efficiency.data_sampling.dynamic_batching.enabled",
    "data_efficiency.data_routing.random_ltd.enabled",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "fp16.fp16_master_weights_and_grads",
    "train_batch_size",
    "scheduler.type",  # goes by the names of schedules, see above
    "aio.use_gds",
}


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_accepted_values_are_read_by_deepspeed(data: st.DataObject) -> None:
    path, field = data.draw(st.sampled_from([leaf for leaf in LEAVES if leaf[0] not in TOGETHER]))
    mapping = nested(path, data.draw(value_of(field)))
    assert problems(mapping) == []
    deepspeed_reads(mapping)


def test_every_type_is_known() -> None:
    """No key has an unknown type: the table of the schema builder fills in what defaults do not tell."""
    assert [path for path, field in LEAVES if field.kind == "any"] == []
    root = json.loads(SNAPSHOT.read_text(encoding="utf-8"))["root"]
    assert [path for path in known_limits(runtime) if field_at(root, path) is None] == []


def test_every_key_that_deepspeed_reads_is_known() -> None:
    recorded = recorded_config(runtime.DeepSpeedConfig).recorded
    assert len(recorded) > 50
    assert [key for key in recorded if SCHEMA.field(key) is None and key not in SCHEMA.removed] == []


def test_optimizers_are_built_with_the_parameters_of_the_schema() -> None:
    import torch

    for name in ("SGD", "AdamW", "RMSprop", "Adagrad", "NAdam"):
        weight = torch.nn.Parameter(torch.zeros(1))
        known = SCHEMA.types["optimizer"][name].fields
        taken = {key: field.default for key, field in known.items() if field.default is not None}
        ours = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction")
        own = {
            key: value
            for key, value in taken.items()
            if key not in ours and not (name == "Adagrad" and key == "amsgrad")
        }
        assert "lr" in own
        getattr(torch.optim, name)([weight], **own)


def test_names_of_both_spellings_are_one_key() -> None:
    (problem,) = problems(zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=2))
    assert "(deepspeed.zero_optimization.prefetch_bucket_size); keep one of them." in problem
