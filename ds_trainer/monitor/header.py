"""The header of a run: a dozen lines printed before the first step. Pure formatting."""

from __future__ import annotations

from dataclasses import dataclass

from ds_trainer.engine.loading.load_report import LoadReport
from ds_trainer.utils.printable import one_line
from ds_trainer.utils.secrets import redacted
from ds_trainer.utils.units import counted, human_bytes, human_count, human_operations


@dataclass(frozen=True)
class RunSummary:
    """The contents of the header. The trainer fills it in; nothing here is computed."""

    model_name: str
    """Class or architecture of the model."""
    parameters_total: int
    parameters_trainable: int

    world_size: int
    data_parallel: int
    tensor_parallel: int
    context_parallel: int
    sequence_parallel: int
    expert_parallel: int

    micro_batch_size: int
    """Samples of one forward pass on one data-parallel rank."""
    accumulation_steps: int
    global_batch_size: int
    """Samples of one optimizer step over all ranks."""

    zero_stage: int
    precision: str
    """Number format that the engine computes in: ``fp32``, ``bf16``, ``fp16`` ..."""
    optimizer: str

    max_steps: int
    num_train_epochs: float
    """Passes over the data that ``max_steps`` makes."""

    device: str
    """``cpu`` or the name of the GPU of one rank."""
    output_dir: str

    num_train_samples: int | None = None
    """None if the dataset has no length."""
    num_eval_samples: int | None = None
    """None if there is no evaluation dataset, or it has no length."""
    offload_optimizer: str | None = None
    """Device of the optimizer states (``cpu``, ``nvme``) if they are offloaded."""
    offload_parameters: str | None = None
    run_name: str | None = None
    """The run's name."""
    resumed_from: str | None = None
    """The checkpoint that the run resumes from."""
    resumed_step: int = 0
    overrides: str | None = None
    """Values that took the place of the script's, and where they are from; None if there are none."""
    replaces_transformers: bool = False
    """Whether the classes of this package stand in place of those of transformers."""
    flops_per_token: float | None = None
    """Operations of a forward and backward pass per token, without attention; None if they are not counted."""
    flops_source: str = ""
    """How they are counted."""
    peak_flops: float | None = None
    """Peak operations per second of one device; None if unknown."""
    weights: str | None = None
    """Result of the comparison of the weights with the model's files; None if there are no files."""
    number_format: str = ""
    """Number format of the peak."""
    estimate: str | None = None
    """Predicted memory and step time, or why there is no prediction."""
    packing: str | None = None
    """What packing did with the samples; None without it."""
    lengths: str | None = None
    """The lengths to which batches are padded; None: each to that of its longest sample."""
    planned: str | None = None
    """Values that ``parallelism="auto"`` has chosen; None if it was not asked to."""
    load: LoadReport | None = None
    """Time and memory of the load from files; None if the model already had its weights."""


def header_lines(summary: RunSummary) -> list[str]:
    """The lines of the header, without line breaks: a title, then one name and value per line."""
    rows = [
        ("model", _model(summary)),
        ("layout", _layout(summary)),
        ("batch", _batch(summary)),
        ("engine", _engine(summary)),
        ("data", _data(summary)),
        ("steps", _steps(summary)),
        ("device", f"{summary.world_size} x {summary.device}"),
        ("output", summary.output_dir),
    ]
    weights = [summary.weights] if summary.weights is not None else []
    weights += [load_text(summary.load)] if summary.load is not None else []
    if weights:
        rows.insert(1, ("weights", "; ".join(weights)))
    for name, value in (("lengths", summary.lengths), ("packing", summary.packing)):
        if value is not None:
            rows.insert(1 + [name for name, _ in rows].index("data"), (name, value))
    if summary.flops_per_token is not None:
        rows.insert(-1, ("compute", _compute(summary)))
    if summary.estimate is not None:
        rows.insert(-1, ("estimate", summary.estimate))
    if summary.planned is not None:
        rows.append(("planned", summary.planned))
    if summary.replaces_transformers:
        rows.append(("replaces", "transformers' Trainer, TrainingArguments and related classes in this process"))
    if summary.overrides is not None:
        rows.append(("overrides", summary.overrides))
    if summary.resumed_from is not None:
        rows.append(("resumed", f"from {summary.resumed_from}, step {summary.resumed_step:,}"))
    width = max(len(name) for name, _ in rows)
    title = "ds_trainer" if summary.run_name is None else f"ds_trainer: {summary.run_name}"
    lines = [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]
    return [one_line(redacted(line)) for line in lines]


def header_text(summary: RunSummary) -> str:
    """:func:`header_lines` as one text, ready to print."""
    return "\n".join(header_lines(summary))


def load_text(load: LoadReport) -> str:
    """One line about a load of weights."""
    tensors = counted(load.tensors, "tensor")
    if load.bytes_read:
        text = f"loaded from {load.source}: {tensors}, {human_bytes(load.bytes_read)} read in {load.seconds:.3g} s"
    else:
        text = f"{load.source}: {tensors}, nothing read, in {load.seconds:.3g} s"
    text += f", host peak {human_bytes(load.host_peak_bytes)}"
    if load.device_peak_bytes:
        text += f", device peak {human_bytes(load.device_peak_bytes)}"
    return text


def _compute(summary: RunSummary) -> str:
    assert summary.flops_per_token is not None  # otherwise the line is left out
    text = f"{human_operations(summary.flops_per_token)} per token without attention ({summary.flops_source})"
    if summary.peak_flops is None:
        return f"{text}; no MFU: unknown peak"
    return f"{text}; peak {human_operations(summary.peak_flops)}/s in {summary.number_format}"


def _model(summary: RunSummary) -> str:
    total, trainable = summary.parameters_total, summary.parameters_trainable
    text = f"{summary.model_name}, {human_count(total)} parameters"
    if trainable == total:
        return f"{text}, all trainable"
    percentage = f" ({100 * trainable / total:.3g} %)" if total else ""
    return f"{text}, {human_count(trainable)} trainable{percentage}"


def _layout(summary: RunSummary) -> str:
    ranks = "rank" if summary.world_size == 1 else "ranks"
    return (
        f"{summary.world_size} {ranks} = dp {summary.data_parallel} x tp {summary.tensor_parallel}"
        f" x cp {summary.context_parallel} x sp {summary.sequence_parallel}"
        + (f", experts over {summary.expert_parallel}" if summary.expert_parallel > 1 else "")
    )


def _batch(summary: RunSummary) -> str:
    return (
        f"global batch {summary.global_batch_size} = {summary.micro_batch_size} per device"
        f" x {summary.accumulation_steps} accumulation x {summary.data_parallel} data parallel"
    )


def _engine(summary: RunSummary) -> str:
    parts = [f"ZeRO {summary.zero_stage}", summary.precision, summary.optimizer]
    if summary.offload_optimizer is not None:
        parts.append(f"optimizer states on {summary.offload_optimizer}")
    if summary.offload_parameters is not None:
        parts.append(f"parameters on {summary.offload_parameters}")
    return ", ".join(parts)


def _data(summary: RunSummary) -> str:
    train = summary.num_train_samples
    text = "a stream of unknown length" if train is None else counted(train, "sample")
    if summary.num_eval_samples is not None:
        text += f", {summary.num_eval_samples:,} for evaluation"
    return text


def _steps(summary: RunSummary) -> str:
    digits = 2 if summary.num_train_epochs >= 0.01 else 4
    epochs = f"{summary.num_train_epochs:.{digits}f}".rstrip("0").rstrip(".")
    unit = "epoch" if epochs == "1" else "epochs"
    return f"{counted(summary.max_steps, 'optimizer step')}, {epochs} {unit}"
