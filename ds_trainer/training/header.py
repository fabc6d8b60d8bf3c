"""Fills the header that is printed before training with what the trainer knows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_trainer.engine.quantized import represented_numel
from ds_trainer.monitor.header import RunSummary, header_text
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.training.work import device_name, number_format, peak_of

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


def print_header(trainer: Trainer, plan: RunPlan, resumed_from: Path | None) -> None:
    """Print the header on the main process."""
    if trainer.is_world_process_zero():
        print(header_text(_summary(trainer, plan, resumed_from)), flush=True)


def _summary(trainer: Trainer, plan: RunPlan, resumed_from: Path | None) -> RunSummary:
    args, layout, batch = trainer.args, trainer.layout, trainer.batch_plan
    parameters = list(trainer.model.parameters())
    rule = trainer.flop_rule
    return RunSummary(
        model_name=type(trainer.model).__name__,
        parameters_total=sum(represented_numel(p) for p in parameters),
        parameters_trainable=sum(represented_numel(p) for p in parameters if p.requires_grad),
        world_size=layout.world_size,
        data_parallel=layout.dp,
        tensor_parallel=layout.tp,
        context_parallel=layout.cp,
        sequence_parallel=layout.sp,
        micro_batch_size=batch.micro_batch,
        accumulation_steps=batch.accumulation,
        global_batch_size=batch.step_size,
        zero_stage=trainer.engine.stage,
        precision=_precision(trainer),
        optimizer=trainer.compiled.get("optimizer.type") or type(trainer.optimizer).__name__,
        max_steps=plan.max_steps,
        num_train_epochs=plan.max_steps / plan.steps_per_epoch,
        device=device_name(trainer),
        output_dir=str(args.output_dir),
        num_train_samples=len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
        num_eval_samples=len(trainer.eval_dataset) if hasattr(trainer.eval_dataset, "__len__") else None,
        offload_optimizer=_offload(trainer, "optimizer"),
        offload_parameters=_offload(trainer, "param"),
        run_name=args.run_name,
        resumed_from=str(resumed_from) if resumed_from else None,
        resumed_step=trainer.state.global_step,
        flops_per_token=None if rule is None else rule.flops_per_token(1),
        flops_source="" if rule is None else rule.source,
        peak_flops=peak_of(trainer),
        number_format=number_format(trainer),
        load=trainer.load_report,
        weights=trainer.weight_check.said,
    )


def _precision(trainer: Trainer) -> str:
    if not trainer.compiled.get("torch_autocast.enabled"):
        return trainer.engine.precision
    dtype = str(trainer.compiled.get("torch_autocast.dtype")).removeprefix("torch.")
    return f"fp32, autocast {dtype}"


def _offload(trainer: Trainer, what: str) -> str | None:
    device = trainer.compiled.get(f"zero_optimization.offload_{what}.device", "none")
    return None if device == "none" else str(device)
