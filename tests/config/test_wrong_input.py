"""Wrong input at the compiler's front door, in a table: one clear sentence each, and nothing reaches DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.config.schema import load_schema
from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def optimizer(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


# What is in the mapping, and what the sentence says.
MAPPINGS: list[tuple[dict[str, Any], str]] = [
    # misspelt
    ({"zero_optimisation": {"stage": 2}}, "unknown key zero_optimisation. Did you mean 'zero_optimization'?"),
    ({"gradient_cliping": 1.0}, "unknown key gradient_cliping. Did you mean 'gradient_clipping'?"),
    ({"train_micro_batch_size": 4}, "Did you mean 'train_micro_batch_size_per_gpu'?"),
    ({"flop_profiler": {}}, "unknown key flop_profiler. Did you mean 'flops_profiler'?"),
    ({"BF16": {"enabled": True}}, "unknown key BF16"),
    (zero(stge=2), "unknown key zero_optimization.stge. Did you mean 'stage'?"),
    (zero(reduce_bucket=5), "unknown key zero_optimization.reduce_bucket. Did you mean 'reduce_bucket_size'?"),
    (zero(stage3_max_live_params=5), "Did you mean 'stage3_max_live_parameters'?"),
    (zero(offload_optimiser={"device": "cpu"}), "Did you mean 'offload_optimizer'?"),
    (zero(offload_optimizer={"devise": "cpu"}), "zero_optimization.offload_optimizer.devise. Did you mean 'device'?"),
    ({"bf16": {"enable": True}}, "unknown key bf16.enable. Did you mean 'enabled'?"),
    ({"fp16": {"loss_scaling": 0}}, "unknown key fp16.loss_scaling. Did you mean 'loss_scale'?"),
    ({"aio": {"que_depth": 8}}, "unknown key aio.que_depth. Did you mean 'queue_depth'?"),
    ({"activation_checkpointing": {"cpu_checkpoint": True}}, "Did you mean 'cpu_checkpointing'?"),
    ({"comms_logger": {"prof_al": True}}, "Did you mean 'prof_all'?"),
    ({"tensorboard": {"outputpath": "x"}}, "Did you mean 'output_path'?"),
    ({"compile": {"deep_compile": True}}, "Did you mean 'deepcompile'?"),
    ({"data_types": {"grad_accum_type": "fp32"}}, "Did you mean 'grad_accum_dtype'?"),
    ({"torch_autocast": {"type": "bfloat16"}}, "unknown key torch_autocast.type"),
    ({"checkpoint": {"writer": {"typ": "fast"}}}, "unknown key checkpoint.writer.typ. Did you mean 'type'?"),
    ({"timers": {"throughputs": {}}}, "Did you mean 'throughput'?"),
    ({"tensor_parallel": {"autotp": 2}}, "unknown key tensor_parallel.autotp. Did you mean 'autotp_size'?"),
    # in the wrong place
    ({"stage": 2}, "unknown key stage. It belongs in zero_optimization."),
    ({"offload_param": {"device": "cpu"}}, "unknown key offload_param. It belongs in zero_optimization."),
    ({"loss_scale": 128}, "unknown key loss_scale. It belongs in fp16."),
    ({"autotp_size": 1}, "unknown key autotp_size. It belongs in tensor_parallel."),
    ({"deepcompile": True}, "unknown key deepcompile. It belongs in compile."),
    (zero(gradient_clipping=1.0), "unknown key zero_optimization.gradient_clipping. It belongs at the top level."),
    ({"bf16": {"grad_accum_dtype": "fp32"}}, "bf16.grad_accum_dtype. It belongs in data_types."),
    ({"ratio": 0.5}, "unknown key ratio. It belongs in zero_optimization.offload_optimizer."),
    # of the wrong type
    (zero(stage="three"), 'zero_optimization.stage="three" must be one of 0, 1, 2, 3.'),
    (zero(stage="2"), 'zero_optimization.stage="2" must be one of 0, 1, 2, 3.'),
    (zero(stage=True), "zero_optimization.stage=true must be one of 0, 1, 2, 3."),
    (zero(stage=2.5), "zero_optimization.stage=2.5 must be one of 0, 1, 2, 3."),
    (zero(overlap_comm="yes"), 'zero_optimization.overlap_comm="yes" must be true or false.'),
    (zero(overlap_comm=1), "zero_optimization.overlap_comm=1 must be true or false."),
    (zero(reduce_bucket_size="5e8x"), 'zero_optimization.reduce_bucket_size="5e8x" must be a whole number'),
    (zero(reduce_bucket_size="200MB"), 'zero_optimization.reduce_bucket_size="200MB" must be a whole number'),
    (zero(reduce_bucket_size=1.5), "zero_optimization.reduce_bucket_size=1.5 must be a whole number"),
    (zero(offload_optimizer="cpu"), 'zero_optimization.offload_optimizer="cpu" must be a mapping such as {"device"'),
    (zero(offload_optimizer=True), "zero_optimization.offload_optimizer=true must be a mapping"),
    ({"zero_optimization": True}, 'zero_optimization=true must be a mapping such as {"stage": 0}.'),
    ({"zero_optimization": 2}, "zero_optimization=2 must be a mapping"),
    ({"bf16": True}, 'bf16=true must be a mapping such as {"enabled": true}.'),
    ({"bf16": {"enabled": "true"}}, 'bf16.enabled="true" must be true or false.'),
    ({"fp16": {"enabled": 1}}, "fp16.enabled=1 must be true or false."),
    ({"fp16": {"initial_scale_power": "16"}}, 'fp16.initial_scale_power="16" must be a whole number'),
    ({"gradient_clipping": "1.0"}, 'gradient_clipping="1.0" must be a number at least 0.'),
    ({"gradient_clipping": True}, "gradient_clipping=true must be a number"),
    ({"train_batch_size": 4.5}, "train_batch_size=4.5 must be a whole number at least 1."),
    ({"optimizer": "AdamW"}, 'optimizer="AdamW" must be a mapping'),
    ({"optimizer": {"type": 3}}, "optimizer.type=3 must be a text."),
    ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer.params=[1] must be a mapping"),
    ({"scheduler": ["WarmupLR"]}, 'scheduler=["WarmupLR"] must be a mapping'),
    ({"data_types": {"grad_accum_dtype": 32}}, "data_types.grad_accum_dtype=32 must be one of"),
    ({"torch_autocast": {"lower_precision_safe_modules": "Linear"}}, "lower_precision_safe_modules"),
    ({"tensorboard": {"enabled": "on"}}, 'tensorboard.enabled="on" must be true or false.'),
    ({"steps_per_print": "10"}, 'steps_per_print="10" must be a whole number at least 1.'),
    ({"wall_clock_breakdown": "no"}, 'wall_clock_breakdown="no" must be true or false.'),
    ({"tensor_parallel": 2}, "tensor_parallel=2 must be a mapping"),
    # out of range
    (zero(stage=4), "zero_optimization.stage=4 must be one of 0, 1, 2, 3."),
    (zero(stage=-1), "zero_optimization.stage=-1 must be one of 0, 1, 2, 3."),
    (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size=0 must be a whole number above 0."),
    (zero(sub_group_size=-1), "zero_optimization.sub_group_size=-1 must be a whole number at least 0."),
    (
        zero(offload_optimizer={"device": "disk"}),
        'offload_optimizer.device="disk" must be one of "none", "cpu", "nvme".',
    ),
    (
        zero(offload_optimizer={"device": "cpu", "ratio": 1.5}),
        "offload_optimizer.ratio=1.5 must be a number at least 0",
    ),
    (zero(offload_param={"device": "gpu"}), 'offload_param.device="gpu" must be one of "none", "cpu", "nvme".'),
    ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale=-1 must be a number at least 0."),
    ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale=0 must be a whole number above 0."),
    ({"gradient_clipping": -1}, "gradient_clipping=-1 must be a number at least 0."),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be a whole number at least 1."),
    ({"train_micro_batch_size_per_gpu": -2}, "train_micro_batch_size_per_gpu=-2 must be a whole number at least 1."),
    ({"communication_data_type": "fp8"}, 'communication_data_type="fp8" must be one of "fp32", "fp16", "bf16".'),
    ({"gradient_allreduce_op": "max"}, 'gradient_allreduce_op="max" must be one of'),
    ({"checkpoint": {"tag_validation": "strict"}}, 'checkpoint.tag_validation="strict" must be one of'),
    ({"checkpoint": {"writer": {"type": "slow"}}}, 'checkpoint.writer.type="slow" must be one of'),
    ({"gradient_predivide_factor": 0}, "gradient_predivide_factor=0 must be a number above 0."),
    (
        zero(zenflow={"topk_ratio": 1.0}),
        "zero_optimization.zenflow.topk_ratio=1.0 must be a number above 0 and below 1.",
    ),
    # nothing where something is needed
    ({"gradient_clipping": None}, "gradient_clipping=null must be a number at least 0; leave it out for the default."),
    (zero(stage=None), "zero_optimization.stage=null must be one of 0, 1, 2, 3; leave it out for the default."),
    # no longer there under that name
    (zero(cpu_offload=True), 'cpu_offload is no longer used. Use offload_optimizer: {"device": "cpu"} instead.'),
    (
        zero(cpu_offload_param=True),
        'cpu_offload_param is no longer used. Use offload_param: {"device": "cpu"} instead.',
    ),
    (zero(cpu_offload_use_pin_memory=True), "cpu_offload_use_pin_memory is no longer used."),
    (zero(stage3_gather_fp16_weights_on_model_save=True), "Use stage3_gather_16bit_weights_on_model_save instead."),
    ({"bfloat16": {"enabled": True}}, "bfloat16 was removed from DeepSpeed. Write bf16."),
    # twice
    (
        zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=2),
        "zero_optimization.stage3_prefetch_bucket_size is another name of zero_optimization.prefetch_bucket_size",
    ),
    # optimizers and schedules
    (optimizer("AdmaW"), 'optimizer.type="AdmaW" in deepspeed.optimizer.type is not an optimizer that works here. Did'),
    (optimizer("OneBitAdam"), 'optimizer.type="OneBitAdam"'),
    (optimizer(beta=0.9), "AdamW has no parameter 'beta'. Did you mean 'betas'?"),
    (optimizer(max_grad_norm=1.0), "AdamW has no parameter 'max_grad_norm'. Set gradient_clipping (max_grad_norm)."),
    (optimizer("SGD", eps=1e-8), "SGD has no parameter 'eps'."),
    (schedule("WarmupLr"), 'scheduler.type="WarmupLr" is not one of'),
    (schedule("CosineAnnealing"), 'scheduler.type="CosineAnnealing" is not one of'),
    (
        schedule("WarmupLR", warmup_steps=3),
        "WarmupLR has no parameter 'warmup_steps'. Did you mean 'warmup_num_steps'?",
    ),
    (
        schedule("WarmupDecayLR", total_num_steps="auto", warmup_num_steps=1),
        'scheduler.params.total_num_steps="auto" in deepspeed.scheduler.params.total_num_steps needs the number',
    ),
    # against the arguments' defaults
    (
        {"gradient_clipping": 0.5},
        "gradient_clipping=0.5 in deepspeed.gradient_clipping, but max_grad_norm=1.0 (default).",
    ),
    ({"bf16": {"enabled": True}}, "bf16.enabled=true in deepspeed.bf16.enabled, but bf16=False (default)."),
    ({"gradient_accumulation_steps": 4}, "but gradient_accumulation_steps=1 (default)."),
    (
        optimizer(lr=1e-3),
        "optimizer.params.lr=0.001 in deepspeed.optimizer.params.lr, but learning_rate=5e-05 (default).",
    ),
    (optimizer(betas=[0.9, 0.95]), "but adam_beta1=0.9, adam_beta2=0.999 (default)."),
    (optimizer(weight_decay=0.1), "but weight_decay=0.0 (default)."),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size=2 in deepspeed.tensor_parallel.autotp_size"),
    ({"sequence_parallel_size": 2}, "but sequence_parallel_size=1 (default)."),
    ({"dataloader_drop_last": True}, "but dataloader_drop_last=False (default)."),
    (
        {"train_batch_size": 64},
        "but 8 (per_device_train_batch_size) x 1 (gradient_accumulation_steps) x 1 (data parallel",
    ),
]


@pytest.mark.parametrize(("mapping", "sentence"), MAPPINGS, ids=lambda value: str(value)[:60])
def test_mapping(mapping: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        compiled(deepspeed=mapping)
    assert len(error.value.problems) == 1
    assert sentence in error.value.problems[0]
    assert "deepspeed." in error.value.problems[0]  # the place


@pytest.mark.parametrize("path", sorted(load_schema().removed))
def test_removed_keys(path: str) -> None:
    """Every key that DeepSpeed removed, with what replaced it in DeepSpeed's own words."""
    mapping: dict[str, Any] = {path.rpartition(".")[2]: {}}
    for section in reversed(path.split(".")[:-1]):
        mapping = {section: mapping}
    with pytest.raises(ConfigError) as error:
        compiled(deepspeed=mapping)
    (problem,) = error.value.problems
    assert f"{path} was removed from DeepSpeed. " in problem
    assert "http" not in problem and problem.endswith(".")


def test_the_table_is_long() -> None:
    assert len(MAPPINGS) + len(load_schema().removed) + len(CONTRADICTIONS) + len(FILES) > 130


# -- arguments against the file --------------------------------------------------------------------------------------

# Arguments with a file (line by line), both values, both places, the remedy.
CONTRADICTIONS: list[tuple[dict[str, Any], str, list[str]]] = [
    (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "tensor_parallel_size": 2, "world": 8},
        '{\n"train_batch_size": 64\n}',
        [
            "train_batch_size=64 in {file}:2, but 4 (per_device_train_batch_size) x 2 (gradient_accumulation_steps) x "
            "4 (data parallel: 8 ranks / tensor 2) = 32.",
            'Write 32 or "auto" there, or leave it out; or change one of the factors.',
        ],
    ),
    (
        {"per_device_train_batch_size": 4},
        '{\n\n"train_micro_batch_size_per_gpu": 2}',
        [
            "train_micro_batch_size_per_gpu=2 in {file}:3",
            "per_device_train_batch_size=4 (argument)",
            '"auto" in {file}:3',
        ],
    ),
    (
        {"zero_stage": 3},
        '{"zero_optimization":\n {"stage": 2}}',
        ["zero_optimization.stage=2 in {file}:2, but zero_stage=3 (argument). Make zero_stage agree with it"],
    ),
    (
        {"offload_optimizer": "none"},
        '{"zero_optimization": {"stage": 2,\n "offload_optimizer": {"device": "cpu"}}}',
        ['offload_optimizer.device="cpu" in {file}:2, but offload_optimizer=none (argument)'],
    ),
    (
        {"offload_param": "nvme", "nvme_path": "/a"},
        '{"zero_optimization": {"offload_param": {\n"nvme_path": "/b"}}}',
        ['nvme_path="/b" in {file}:2, but nvme_path=/a (argument)'],
    ),
    (
        {"optim": "sgd"},
        '{"optimizer": {"type": "Adam"}}',
        ['optimizer.type="Adam" in {file}:1, but optim=sgd (argument). Keep one of them.'],
    ),
    (
        {"lr_scheduler_type": "cosine"},
        '{"scheduler": {"type": "WarmupLR", "params": {}}}',
        ['scheduler.type="WarmupLR" in {file}:1, but lr_scheduler_type=cosine (argument). Keep one of them.'],
    ),
    (
        {"learning_rate": 1e-3},
        '{"scheduler": {"type": "WarmupLR", "params": {\n"warmup_max_lr": 0.1}}}',
        ["scheduler.params.warmup_max_lr=0.1 in {file}:2, but learning_rate=0.001 (argument)"],
    ),
    (
        {"torch_autocast": "bf16"},
        '{"torch_autocast": {"enabled": true,\n "dtype": "float16"}}',
        ['torch_autocast.dtype="float16" in {file}:2, but torch_autocast=bf16 (argument)'],
    ),
    (
        {"torch_autocast": "none"},
        '{"torch_autocast": {"enabled": true}}',
        ["torch_autocast.enabled=true in {file}:1, but torch_autocast=none (argument)"],
    ),
    (
        {"client_optimizer": "optimizers=(SGD, ...) handed to the Trainer"},
        '{\n"optimizer": {\n"type": "AdamW"}}',
        ["{file}:3 has an optimizer, but optimizers=(SGD, ...) handed to the Trainer. Keep one of them."],
    ),
    (
        {"parallelism_config": {"dp_shard_size": 4}, "world": 2},
        "{}",
        ["dp_replicate_size x dp_shard_size = 4 replicas", "dp is 2"],
    ),
    ({"optim_args": "lr=3"}, "{}", ["optim_args=lr=3 (argument): set learning_rate instead of 'lr'."]),
    ({"nvme_path": "/a"}, "{}", ["nvme_path=/a (argument), but nothing is offloaded to NVMe."]),
]


@pytest.mark.parametrize(("arguments", "text", "sentences"), CONTRADICTIONS, ids=lambda value: str(value)[:50])
def test_contradiction(arguments: dict[str, Any], text: str, sentences: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        compiled(deepspeed=str(file), **arguments)
    assert len(error.value.problems) == 1
    for sentence in sentences:
        assert sentence.replace("{file}", str(file)) in error.value.problems[0]


def test_auto_settles_a_contradiction() -> None:
    for mapping in (
        {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"},
        {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}},
        optimizer(lr="auto", betas="auto", eps="auto", weight_decay="auto"),
        {"tensor_parallel": {"autotp_size": "auto"}, "sequence_parallel_size": "auto"},
        zero(stage="auto", reduce_bucket_size="auto"),
    ):
        config = compiled(deepspeed=mapping, zero_stage=1, learning_rate=1e-3, max_grad_norm=0.5, bf16=True)
        assert '"auto"' not in config.to_json()
        assert config.get("gradient_clipping") == 0.5
        assert config.get("optimizer.params.lr") == 1e-3


def test_auto_that_nothing_decides_is_deepspeeds_default() -> None:
    config = compiled(deepspeed=zero(stage=3, sub_group_size="auto", overlap_comm="auto"))
    assert config.get("zero_optimization.sub_group_size") == 1_000_000_000
    assert "zero_optimization.overlap_comm" not in config  # DeepSpeed decides by the stage
    assert str(config.origin("zero_optimization.sub_group_size")).startswith("default: DeepSpeed's, for auto")


def test_auto_that_is_a_value_stays() -> None:
    config = compiled(deepspeed={"data_types": {"keep_in_fp32_modules": "auto"}})
    assert config.get("data_types.keep_in_fp32_modules") == "auto"


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        compiled(deepspeed={"elasticity": {}, "bf16": True, **zero(stage=9, stge=1), "gradient_cliping": 1})
    assert len(error.value.problems) == 5
    with pytest.raises(ConfigError) as error:
        compiled(deepspeed={"gradient_clipping": 2.0, "train_batch_size": 7, **optimizer(lr=1.0, foo=1)})
    assert len(error.value.problems) == 4


# -- files -----------------------------------------------------------------------------------------------------------

FILES: list[tuple[str, str]] = [
    ('{"bf16": {"enabled": true}', "{file}:1:27: "),
    ('{\n"zero_optimization": {\n"stage" 2}}', "{file}:3:9: "),
    ('{"a": 1,,}', "{file}:1:9: "),
    (
        '{"bf16": {enabled: auto}}',
        "{file}:1: the unquoted text 'auto}}' goes to the end of the line; put quotes around it.",
    ),
    ("[1, 2]", "{file}: a DeepSpeed configuration is a mapping in braces, not [1, 2]."),
    ("", "{file} is empty; write {} for a configuration without settings."),
    ('"text"', "{file}: a DeepSpeed configuration is a mapping in braces, not 'text'."),
    ('{"fp16": {"loss_scale": 0}, "fp16": {}}', "{file}:1: duplicate key 'fp16', first given in {file}:1; remove one."),
    ('{"fp16": {"loss_scale": 1e999}}', "{file} cannot be parsed: "),
]


@pytest.mark.parametrize(("text", "sentence"), FILES)
def test_file(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        compiled(deepspeed=str(file))
    assert len(error.value.problems) == 1
    assert sentence.replace("{file}", str(file)) in error.value.problems[0]


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\x80\x81")
    for source, sentence in (
        (tmp_path / "nowhere.json", "there is no such file"),
        (tmp_path, "is a directory; name a JSON file in it."),
        (tmp_path / "binary.json", "is not UTF-8 text (byte 0)"),
    ):
        with pytest.raises(ConfigError) as error:
            compiled(deepspeed=str(source))
        assert sentence in str(error.value) and str(source) in str(error.value)
    with pytest.raises(ConfigError, match=r"deepspeed=3: expected str or a mapping or null"):
        compiled(deepspeed=3)


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_answers_without_deepspeed(tmp_path: Path) -> None:
    """A wrong file ends `ds-trainer config` with exit code 2 before torch or deepspeed are imported."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {\n"stage": 5}}')
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {architecture: {model_type: llama, hidden_size: 64}}\n"
        "data: {train: nowhere.txt, sequence_length: 8}\n"
        f"arguments: {{deepspeed: {tmp_path}/ds.json}}\n"
    )
    code = (
        "import sys; from ds_trainer.cli.main import main; code = main(['config', sys.argv[1]]);"
        "print(code, [name for name in ('torch', 'deepspeed', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "[]"]
    assert f"{tmp_path}/ds.json:2: zero_optimization.stage=5 must be one of 0, 1, 2, 3." in done.stderr


def test_a_recipe_may_hold_the_configuration_and_names_its_lines(tmp_path: Path) -> None:
    from ds_trainer.cli.main import main

    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {architecture: {model_type: llama, hidden_size: 64}}\n"
        "data: {train: nowhere.txt, sequence_length: 8}\n"
        "arguments:\n  bf16: true\n  deepspeed:\n    bf16:\n      enabled: false\n"
    )
    assert main(["config", str(recipe)]) == 2
    recipe.write_text(recipe.read_text().replace("enabled: false", "enabled: auto"))
    assert main(["config", str(recipe)]) == 0


def test_nothing_reaches_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer refuses at construction; deepspeed.initialize is never called."""
    import deepspeed

    from ds_trainer import Trainer, TrainingArguments
    from tests.support.models import Regression, regression_rows

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("deepspeed.initialize was reached")

    monkeypatch.setattr(deepspeed, "initialize", fail)
    for mapping, _ in MAPPINGS[::7]:
        args = TrainingArguments("out", deepspeed=json.loads(json.dumps(mapping)), use_cpu=True)
        with pytest.raises(ConfigError):
            Trainer(Regression(), args, train_dataset=regression_rows(4))
