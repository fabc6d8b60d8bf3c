"""Keys that DeepSpeed does not read: accepted with one warning, and refused only where another key was meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ds_trainer.config.schema import Field, load_schema
from ds_trainer.config.user_config import read_user_config
from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled, leaves, nested, said

SCHEMA = load_schema()


def sections(section: Field, path: str = "") -> Iterator[tuple[str, Field]]:
    """Every section of the schema, with its path; the first is the whole file."""
    yield path, section
    for name, below in section.fields.items():
        if below.kind == "section":
            yield from sections(below, f"{path}.{name}" if path else name)


def deepspeed_reads(mapping: dict[str, Any]) -> bool:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **mapping})
    except Exception:  # asserts, pydantic's, TypeError
        return False
    return True


def findings(mapping: dict[str, Any]) -> list[Any]:
    return SCHEMA.findings(read_user_config(mapping)[0])


# Passed to a constructor, which refuses what it does not know (tests/config/test_wrong_input.py).
CLOSED = ("optimizer.params", "scheduler.params")
SECTIONS = [(path, field) for path, field in sections(SCHEMA.root) if path not in CLOSED and not field.open]


@pytest.mark.parametrize(("path", "section"), SECTIONS, ids=[path or "file" for path, _ in SECTIONS])
def test_an_unknown_key_is_refused_where_deepspeed_refuses_it(path: str, section: Field) -> None:
    key = f"{path}.xyzzy" if path else "xyzzy"
    on = {"enabled": True} if "enabled" in section.fields and not section.strict else {}
    mapping = nested(path, {**on, "xyzzy": 1}) if path else {"xyzzy": 1}
    (found,) = findings(mapping)
    assert found.refused != deepspeed_reads(nested(key, 1))
    assert found.refused is section.strict
    assert key in found.sentence and f"deepspeed.{key}" in found.sentence


IDLE = [
    (path, field)
    for block, section in sections(SCHEMA.root)
    if block and "enabled" in section.fields
    for path, field in leaves(section, block)
    if path != f"{block}.enabled"
]


@pytest.mark.parametrize("path", [path for path, _ in IDLE])
def test_values_of_a_block_that_is_off_are_refused_where_deepspeed_refuses_them(path: str) -> None:
    """In blocks without a pydantic model, which DeepSpeed reads only if they are enabled."""
    block, key = path.split(".", 1)
    if SCHEMA.root.fields[block].strict or SCHEMA.field(path).refused:  # type: ignore[union-attr]
        return
    off = {block: {"enabled": False, **nested(key, [3])}}
    assert not any(found.refused for found in findings(off)) or not deepspeed_reads(off)


def test_one_warning_names_them_all() -> None:
    """Blocks of other programs, of older guides, and settings that another one turns off."""
    file = {
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "tag": "run"},
        "fp32_allreduce": False,
        "zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8},
        "activation_checkpointing": {"cpu_checkpointing": True},
        "optimizer": {"type": "AdamW", "note": "ours"},
    }
    (warning,) = said(deepspeed=file, world=8, zero_stage=2)
    for part in (
        "comms_config (deepspeed.comms_config; did you mean 'comms_logger'?)",
        "monitor_config (deepspeed.monitor_config)",
        "fp32_allreduce (deepspeed.fp32_allreduce)",
        "optimizer.note (deepspeed.optimizer.note)",
        "zero_hpz_partition_size=8 (deepspeed.zero_optimization.zero_hpz_partition_size)",
        "activation_checkpointing.cpu_checkpointing=true",
        "Set activation_checkpointing=True.",
    ):
        assert part in warning
    config = compiled(deepspeed=file, world=8, zero_stage=2).to_dict()
    assert config["comms_config"] == {"verbose": False}  # DeepSpeed gets them as they are
    assert config["monitor_config"] == {"enabled": True, "tag": "run"}


# Not read by DeepSpeed, but it would train with another value than was meant.
MEANT: list[tuple[dict[str, Any], str]] = [
    ({"gradient_cliping": 1.0}, "Did you mean 'gradient_clipping'?"),
    ({"Gradient_Clipping": 1.0}, "Did you mean 'gradient_clipping'?"),
    ({"offload_optimizer": {"device": "cpu"}}, "It belongs in zero_optimization."),
    ({"overlap_comm": False}, "It belongs in zero_optimization."),
    ({"fp32_allreduce": True}, 'Write communication_data_type: "fp32".'),
    ({"max_grad_norm": 0.5}, "It is an argument, not a DeepSpeed key."),
    ({"optimizer": {"type": "AdamW", "lr": 0.1}}, "It belongs in optimizer.params."),
    ({"torch_autocast": {"enabled": True, "dtypes": "bf16"}}, "Did you mean 'dtype'?"),
]


@pytest.mark.parametrize(("mapping", "advice"), MEANT, ids=lambda value: str(value)[:40])
def test_another_key_was_meant(mapping: dict[str, Any], advice: str) -> None:
    assert deepspeed_reads(mapping)
    (problem,) = said(deepspeed=mapping)
    assert advice in problem and "does not read" not in problem


def test_a_key_of_another_kind_was_not_meant() -> None:
    """A note is not the section of a similar name, whatever its spelling."""
    for mapping in ({"comment": "what this file is for"}, {"_comment": ["a"]}, {"pipelines": 3}, {"optimizers": None}):
        (warning,) = said(deepspeed=mapping)
        assert "does not read" in warning
    (problem,) = said(deepspeed={"pipelines": {"stages": 2}})
    assert "Did you mean 'pipeline'?" in problem


def test_a_key_that_is_refused_is_to_be_removed_or_replaced() -> None:
    """Whatever is unknown in a block with a pydantic model, and options that older versions had there."""
    for mapping, cure in (
        ({"compile": {"enabled": True, "backend": "inductor"}}, "Set torch_compile, an argument."),
        ({"compile": {"xyzzy": 1}}, "unknown key compile.xyzzy. Remove it."),
        ({"fp16": {"scale_tolerance": 0.25}}, "Remove it. Known keys: enabled"),
        ({"fp16": {"opt_level": "O2"}}, "It was an option of apex"),
        ({"seed": 3}, "It is an argument, not a DeepSpeed key. Set it there, and remove it here."),
    ):
        assert cure in said(deepspeed=mapping)[0]


def test_a_misplaced_key_that_asks_for_nothing_is_accepted() -> None:
    for mapping in ({"offload_param": {"device": "none"}}, {"reduce_scatter": True}, {"verbose": True}):
        (warning,) = said(deepspeed=mapping)
        assert "does not read" in warning
        compiled(deepspeed=mapping)


def test_a_misplaced_block_is_read_where_it_is() -> None:
    """Its own mistakes are in the same list."""
    aio = {"block_size": 0, "thread_count": 4}
    problems = said(deepspeed={"zero_optimization": {"aio": aio}})
    assert [problem.split(": ")[1].split(".")[0] for problem in problems] == [
        "unknown key zero_optimization",
        "zero_optimization",
        "zero_optimization",
    ]
    assert "It belongs at the top level." in problems[0]
    assert "aio.block_size=0 must be" in problems[1] and "Write aio.intra_op_parallelism." in problems[2]


def test_older_keys_that_are_off_do_not_reach_deepspeed() -> None:
    """DeepSpeed refuses them beside the newer ones, even if they are off."""
    zero = {"stage": 2, "cpu_offload": False, "offload_optimizer": {"device": "cpu"}}
    assert not deepspeed_reads({"zero_optimization": zero})
    config = compiled(deepspeed={"zero_optimization": zero})
    assert "zero_optimization.cpu_offload" not in config and config.offload("optimizer") == "cpu"
    assert deepspeed_reads({"zero_optimization": config.to_dict()["zero_optimization"]})
    with pytest.raises(ConfigError, match="Use offload_optimizer"):
        compiled(deepspeed={"zero_optimization": {"stage": 2, "cpu_offload": True}})


def test_the_older_name_of_bf16_is_read() -> None:
    file = {"bfloat16": {"enabled": True}}
    assert deepspeed_reads(file)
    assert compiled(deepspeed=file, bf16=True).get("bf16.enabled") is True
    with pytest.raises(ConfigError, match="bf16=False"):
        compiled(deepspeed=file)


OFF = {"enabled": False}
AS_WRITTEN: dict[str, dict[str, Any]] = {  # blocks of tutorials and old files, whole
    "hybrid engine, off": {"hybrid_engine": {**OFF, "max_out_tokens": 512, "inference_tp_size": 1}},
    "legacy curriculum": {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8}},
    "legacy curriculum, off": {"curriculum_learning": {**OFF, "curriculum_type": "seqlen"}},
    "elasticity": {"elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}},
    "quantized training": {"quantize_training": {"enabled": True, "quantize_bits": {"start_bits": 16}}},
    "compression": {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
    "layer drop": {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001}},
    "sparse attention": {"sparse_attention": {"mode": "fixed", "block": 16}},
    "apex": {"amp": {"enabled": True, "opt_level": "O1"}},
    "sparse gradients, off": {"sparse_gradients": False, "prescale_gradients": False},
    "MiCS": {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    "checkpoints": {"checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}}},
    "activations": {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": None}},
    "texts in place of numbers": {"zero_optimization": {"stage": "2", "reduce_bucket_size": "5e8"}},
    "eigenvalue": {"eigenvalue": {"enabled": True, "max_iter": 100}},
    "data types": {"data_types": {"grad_accum_dtype": "fp32"}, "gradient_predivide_factor": 1.0},
    "bfloat16": {"bfloat16": {"enabled": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_blocks_of_tutorials_are_judged_as_deepspeed_does(name: str) -> None:
    file = AS_WRITTEN[name]
    assert (SCHEMA.problems(read_user_config(file)[0]) == []) is deepspeed_reads(file)
