"""Fills the header that is printed before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_trainer.arguments.overrides import PLANNED, overridden_text
from ds_trainer.engine.quantized_weights import represented_numel
from ds_trainer.monitor.header import RunSummary, header_text
from ds_trainer.training.engines import Engines
from ds_trainer.training.loop.packed_data import summary_of
from ds_trainer.training.loop.token_counter import device_name, number_format, peak_of
from ds_trainer.training.loop.training_run import TrainingRun
from ds_trainer.training.telemetry import Telemetry
from ds_trainer.utils.printable import say
from ds_trainer.utils.replaced_transformers import is_replaced


def print_header(
    run: TrainingRun,
    engines: Engines,
    telemetry: Telemetry,
    train_dataset: Any,
    eval_dataset: Any,
    resumed_from: Path | None,
    estimate: str,
    prediction: dict[str, Any] | None,
) -> None:
    """Print the header on the main process, and begin the record of the run there.

    ``estimate`` is the prediction of the run as text, ``prediction`` as plain data.
    """
    if run.is_main_process:
        summary = _summary(
            run=run,
            engines=engines,
            telemetry=telemetry,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            resumed_from=resumed_from,
            estimate=estimate,
        )
        say(header_text(summary))
        telemetry.recorder.begin(summary, prediction, run)


def _summary(
    run: TrainingRun,
    engines: Engines,
    telemetry: Telemetry,
    train_dataset: Any,
    eval_dataset: Any,
    resumed_from: Path | None,
    estimate: str,
) -> RunSummary:
    args, batch, plan, config, engine = run.events.args, run.batch_plan, run.plan, run.config, run.engine
    layout, parameters = batch.layout, list(run.model.parameters())
    rule = telemetry.flop_rule(run.model)
    packed = summary_of(run.loader)
    lengths = getattr(getattr(run.loader, "collate_fn", None), "lengths_text", None)
    return RunSummary(
        model_name=type(run.model).__name__,
        parameters_total=sum(represented_numel(p) for p in parameters),
        parameters_trainable=sum(represented_numel(p) for p in parameters if p.requires_grad),
        world_size=layout.world_size,
        data_parallel=layout.dp,
        tensor_parallel=layout.tp,
        context_parallel=layout.cp,
        sequence_parallel=layout.sp,
        expert_parallel=layout.ep,
        micro_batch_size=batch.micro_batch,
        accumulation_steps=batch.accumulation,
        global_batch_size=batch.global_batch_size,
        zero_stage=engine.stage,
        precision=str(config.precision),
        optimizer=config.optimizer_type or type(run.optimizer).__name__,
        max_steps=plan.max_steps,
        num_train_epochs=plan.max_steps / plan.steps_per_epoch,
        device=device_name(run.device),
        output_dir=str(args.output_dir),
        num_train_samples=len(train_dataset) if hasattr(train_dataset, "__len__") else None,
        num_eval_samples=_number_of_samples(eval_dataset),
        offload_optimizer=config.offload("optimizer"),
        offload_parameters=config.offload("param"),
        run_name=args.run_name,
        resumed_from=str(resumed_from) if resumed_from else None,
        resumed_step=run.events.state.global_step,
        overrides=overridden_text(args),
        replaces_transformers=is_replaced(),
        flops_per_token=None if rule is None else rule.flops_per_token(1),
        flops_source="" if rule is None else rule.source,
        peak_flops=peak_of(config, run.device),
        number_format=number_format(config, run.device),
        estimate=estimate,
        packing=None if packed is None else packed.text(),
        lengths=None if lengths is None else lengths(),
        planned=overridden_text(args, PLANNED),
        load=engines.load_report,
        weights=engines.weight_check.summary,
    )


def _number_of_samples(dataset: Any) -> int | None:
    """Samples of a dataset, or of several by name; None for a stream."""
    parts = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    return sum(map(len, parts)) if all(hasattr(part, "__len__") for part in parts) else None
