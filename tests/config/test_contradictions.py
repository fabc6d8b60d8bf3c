"""Contradictions: arguments against the file, files that cannot be read, and the output of the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled
from tests.config.test_wrong_input import optimizer, zero

# -- arguments against the file --------------------------------------------------------------------------------------

# Arguments with a file (line by line), both values, both sources, the remedy.
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
        ["zero_optimization.stage=2 in {file}:2, but zero_stage=3 (argument). Set zero_stage=2, or write"],
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
        {"client_optimizer": "optimizers=(SGD, ...) passed to the Trainer"},
        '{\n"optimizer": {\n"type": "AdamW"}}',
        ["{file}:3 has an optimizer, but optimizers=(SGD, ...) passed to the Trainer. Keep one of them."],
    ),
    (
        {"parallelism_config": {"dp_shard_size": 4}, "world": 2},
        "{}",
        ["dp_replicate_size x dp_shard_size = 4 replicas", "dp is 2"],
    ),
    (  # torch's AdamW, and DeepSpeed's Adam with L2 regularization
        {"optim": "adamw_torch"},
        '{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}',
        ['optimizer.type="Adam" in {file}:1, but optim=adamw_torch (argument).'],
    ),
    (
        {"optim": "adamw_torch_fused"},
        '{"optimizer": {"type": "AdamW", "params": {"fused": false}}}',
        ["optimizer.params.fused=false in {file}:1, but optim=adamw_torch_fused (argument)"],
    ),
    (
        {"warmup_steps": 10},
        '{"scheduler": {"type": "WarmupLR", "params": {\n"warmup_num_steps": 20}}}',
        ["warmup_num_steps=20 in {file}:2, but warmup_steps=10 (argument), at least 1. Set warmup_steps=20"],
    ),
    (
        {"max_steps": 100},
        '{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1,\n"total_num_steps": 200}}}',
        ["total_num_steps=200 in {file}:2, but the run has 100 optimizer steps. Set max_steps=200"],
    ),
    (
        {"total_steps": 50},
        '{"scheduler": {"type": "WarmupCosineLR", "params": {\n"total_num_steps": 200}}}',
        ["total_num_steps=200 in {file}:2, but the run has 50 optimizer steps."],
    ),
    (
        {"communication_data_type": "fp32", "torch_autocast": "bf16"},
        '{"torch_autocast": {\n"lower_precision_safe_modules": ["torch.nn.Linear"]}}',
        ["lower_precision_safe_modules=", "in {file}:2, but communication_data_type=fp32 (argument)."],
    ),
    ({"optim_args": "lr=3"}, "{}", ["optim_args=lr=3 (argument): set learning_rate instead of 'lr'."]),
    ({"nvme_path": "/a"}, "{}", ["nvme_path=/a (argument), but nothing is offloaded to NVMe."]),
]


@pytest.mark.parametrize(("arguments", "text", "messages"), CONTRADICTIONS, ids=lambda value: str(value)[:50])
def test_contradictions_are_reported(arguments: dict[str, Any], text: str, messages: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        compiled(deepspeed=str(file), **arguments)
    assert len(error.value.problems) == 1
    for message in messages:
        assert message.replace("{file}", str(file)) in error.value.problems[0]


def test_other_spellings_of_the_same_agree() -> None:
    for arguments, file in (
        ({"bf16": True, "grad_accum_dtype": "fp32"}, {"data_types": {"grad_accum_dtype": "torch.float32"}}),
        ({"communication_data_type": "bf16"}, {"communication_data_type": "BF16"}),
        ({"optim": "adamw_torch"}, {"optimizer": {"type": "adam", "params": {"adam_w_mode": True}}}),
        ({"zero_stage": 2}, {"zero_optimization": {"stage": "2"}}),
        ({"torch_autocast": "bf16"}, {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}),
        ({"warmup_steps": 0}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}}),
    ):
        compiled(deepspeed=file, **arguments)


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


def test_undecided_auto_is_the_default_of_deepspeed() -> None:
    config = compiled(deepspeed=zero(stage=3, sub_group_size="auto", overlap_comm="auto"))
    assert config.get("zero_optimization.sub_group_size") == 1_000_000_000
    assert "zero_optimization.overlap_comm" not in config  # DeepSpeed decides by the stage
    assert str(config.origin("zero_optimization.sub_group_size")).startswith("default: DeepSpeed's, for auto")


def test_auto_for_a_parameter_that_the_optimizer_lacks_is_ignored() -> None:
    """So one file serves several optimizers."""
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    config = compiled(deepspeed={"optimizer": {"type": "SGD", "params": params}})
    assert set(config.get("optimizer.params")) == {"lr", "weight_decay"}


def test_tensor_parallelism_of_size_zero_is_none() -> None:
    config = compiled(deepspeed={"tensor_parallel": {"autotp_size": 0}})
    assert "tensor_parallel" not in config


def test_auto_that_is_a_valid_value_is_kept() -> None:
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
        "{file}:1: the unquoted string 'auto}}' extends to the end of the line; put quotes around it.",
    ),
    ("[1, 2]", "{file}: a DeepSpeed configuration is a mapping in braces, not [1, 2]."),
    ("", "{file} is empty; write {} for a configuration without settings."),
    ('"text"', "{file}: a DeepSpeed configuration is a mapping in braces, not 'text'."),
    ('{"fp16": {"loss_scale": 0}, "fp16": {}}', "{file}:1: duplicate key 'fp16', first given in {file}:1; remove one."),
    ('{"fp16": {"loss_scale": 1e999}}', "{file}:1:25: a number that is too large."),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_wrong_files_are_reported(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        compiled(deepspeed=str(file))
    assert len(error.value.problems) == 1
    assert message.replace("{file}", str(file)) in error.value.problems[0]


def test_paths_that_are_no_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\x80\x81")
    for source, message in (
        (tmp_path / "nowhere.json", "does not exist (working directory:"),
        (tmp_path, "is a directory; name a JSON file in it."),
        (tmp_path / "binary.json", "is not UTF-8 text (byte 0)"),
    ):
        with pytest.raises(ConfigError) as error:
            compiled(deepspeed=str(source))
        assert message in str(error.value) and str(source) in str(error.value)
    with pytest.raises(ConfigError, match=r"deepspeed=3: expected str or a mapping or null"):
        compiled(deepspeed=3)


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_config_command_works_without_deepspeed(tmp_path: Path) -> None:
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
    completed = subprocess.run([sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["2", "[]"]
    assert f"{tmp_path}/ds.json:2: zero_optimization.stage=5 must be one of 0, 1, 2, 3." in completed.stderr


def test_a_recipe_may_contain_the_configuration_and_problems_name_its_lines(tmp_path: Path) -> None:
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
