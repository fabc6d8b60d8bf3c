"""Wrong input at the compiler's front door, in a table: one clear sentence each, and nothing reaches DeepSpeed."""

from __future__ import annotations

import json
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


# A mapping, and a part of the message.
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
    ({"learning_rate": 1e-3}, "unknown key learning_rate. It is an argument, not a DeepSpeed key."),
    ({"lr": 1e-3}, "unknown key lr. It belongs in optimizer.params."),
    # of the wrong type
    (optimizer(lr="5e-5"), 'optimizer.params.lr="5e-5" must be a number'),
    (optimizer(betas=0.9), "optimizer.params.betas=0.9 must be a list"),
    (optimizer(betas=[0.9]), "optimizer.params.betas=[0.9] must be a list of 2 numbers."),
    ({"scheduler": {"params": {"warmup_num_steps": 3}}}, "scheduler has no type."),
    (zero(stage="three"), 'zero_optimization.stage="three" must be one of 0, 1, 2, 3.'),
    (zero(stage=True), "zero_optimization.stage=true must be one of 0, 1, 2, 3."),
    (zero(stage=2.5), "zero_optimization.stage=2.5 must be one of 0, 1, 2, 3."),
    (zero(overlap_comm="maybe"), 'zero_optimization.overlap_comm="maybe" must be true or false.'),
    (zero(overlap_comm=2), "zero_optimization.overlap_comm=2 must be true or false."),
    (zero(reduce_bucket_size="5e8"), 'zero_optimization.reduce_bucket_size="5e8" must be a whole number above 0.'),
    (zero(reduce_bucket_size="5e8x"), 'zero_optimization.reduce_bucket_size="5e8x" must be a whole number'),
    (zero(reduce_bucket_size="200MB"), 'zero_optimization.reduce_bucket_size="200MB" must be a whole number'),
    (zero(reduce_bucket_size=1.5), "zero_optimization.reduce_bucket_size=1.5 must be a whole number"),
    (zero(offload_optimizer="cpu"), 'zero_optimization.offload_optimizer="cpu" must be a mapping such as {"device"'),
    (zero(offload_optimizer=True), "zero_optimization.offload_optimizer=true must be a mapping"),
    ({"zero_optimization": True}, 'zero_optimization=true must be a mapping such as {"stage": 0}.'),
    ({"zero_optimization": 2}, "zero_optimization=2 must be a mapping"),
    ({"bf16": True}, 'bf16=true must be a mapping such as {"enabled": true}.'),
    ({"bf16": {"enabled": "enabled"}}, 'bf16.enabled="enabled" must be true or false.'),
    ({"fp16": {"enabled": 3}}, "fp16.enabled=3 must be true or false."),
    ({"fp16": {"initial_scale_power": "2**16"}}, 'fp16.initial_scale_power="2**16" must be a whole number'),
    ({"gradient_clipping": "1.0"}, 'gradient_clipping="1.0" must be a number at least 0.'),
    ({"gradient_clipping": True}, "gradient_clipping=true must be a number"),
    ({"train_batch_size": 4.5}, "train_batch_size=4.5 must be a whole number at least 1."),
    ({"optimizer": "AdamW"}, 'optimizer="AdamW" must be a mapping'),
    ({"optimizer": {"type": 3}}, "optimizer.type=3 must be a string."),
    ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer.params=[1] must be a mapping"),
    ({"scheduler": ["WarmupLR"]}, 'scheduler=["WarmupLR"] must be a mapping'),
    ({"data_types": {"grad_accum_dtype": 32}}, "data_types.grad_accum_dtype=32 must be one of"),
    ({"torch_autocast": {"lower_precision_safe_modules": "Linear"}}, "lower_precision_safe_modules"),
    ({"tensorboard": {"enabled": "tb"}}, 'tensorboard.enabled="tb" must be true or false.'),
    (optimizer(betas="[0.9, 0.95]"), "must be a list. Write [0.9, 0.95], without quotes around it."),
    (optimizer(betas="(0.9, 0.95)"), "must be a list. Write [0.9, 0.95], without quotes around it."),
    (optimizer(betas="0.9, 0.95"), "must be a list. Write [0.9, 0.95], without quotes around it."),
    ({"optimizer": '{"type": "AdamW"}'}, 'must be a mapping such as {"type": 1}. Remove the quotes around it.'),
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
    ({"gradient_clipping": -1}, "gradient_clipping=-1 must be a number at least 0."),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be a whole number at least 1."),
    ({"train_micro_batch_size_per_gpu": -2}, "train_micro_batch_size_per_gpu=-2 must be a whole number at least 1."),
    ({"communication_data_type": "fp8"}, 'communication_data_type="fp8" must be one of "fp32", "fp16", "bf16".'),
    ({"gradient_allreduce_op": "max"}, 'gradient_allreduce_op="max" must be one of'),
    ({"checkpoint": {"tag_validation": "strict"}}, 'checkpoint.tag_validation="strict" must be one of'),
    ({"gradient_predivide_factor": 0}, "gradient_predivide_factor=0 must be a number above 0."),
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
    ({"bfloat16": {"enabled": True}}, "bf16.enabled=true in deepspeed.bfloat16.enabled, but bf16=False (default)."),
    # twice
    (
        zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=2),
        "zero_optimization.stage3_prefetch_bucket_size is another name of zero_optimization.prefetch_bucket_size",
    ),
    # optimizers and schedules
    (optimizer("AdmaW"), 'optimizer.type="AdmaW" in deepspeed.optimizer.type is not a supported optimizer. Did'),
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
    (schedule("WarmupDecayLR", warmup_num_steps=1), "WarmupDecayLR"),
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


@pytest.mark.parametrize(("mapping", "message"), MAPPINGS, ids=lambda value: str(value)[:60])
def test_wrong_mappings_are_rejected(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compiled(deepspeed=mapping)
    assert len(error.value.problems) == 1
    assert message in error.value.problems[0]
    assert "deepspeed." in error.value.problems[0]  # the place


@pytest.mark.parametrize("path", sorted(load_schema().removed))
def test_removed_keys(path: str) -> None:
    """Every key that DeepSpeed removed, with what replaced it in DeepSpeed's own words."""
    mapping: dict[str, Any] = {path.rpartition(".")[2]: True}
    for section in reversed(path.split(".")[:-1]):
        mapping = {section: mapping}
    with pytest.raises(ConfigError) as error:
        compiled(deepspeed=mapping)
    (problem,) = error.value.problems
    assert f"{path} was removed from DeepSpeed. " in problem
    assert "http" not in problem and problem.endswith(".")


def test_the_table_has_many_cases() -> None:
    assert len(MAPPINGS) + len(load_schema().removed) > 120


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
