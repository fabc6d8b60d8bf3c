"""What is about to run, in a dozen lines printed before the first step. Pure formatting."""

from __future__ import annotations

from dataclasses import dataclass

from ds_trainer.engine.loading.report import LoadReport
from ds_trainer.monitor.units import human_bytes, human_count, human_operations


@dataclass(frozen=True)
class RunSummary:
    """What the header says. The trainer fills it; nothing here is computed from anything else."""

    model_name: str
    """Class or architecture of the model."""
    parameters_total: int
    parameters_trainable: int

    world_size: int
    data_parallel: int
    tensor_parallel: int
    context_parallel: int
    sequence_parallel: int

    micro_batch_size: int
    """Samples of one forward pass on one data-parallel rank."""
    accumulation_steps: int
    global_batch_size: int
    """Samples of one optimizer step over all ranks."""

    zero_stage: int
    precision: str
    """``fp32``, ``bf16``, ``fp16`` or what else the engine computes in."""
    optimizer: str

    max_steps: int
    num_train_epochs: float
    """Passes over the data that ``max_steps`` makes."""

    device: str
    """``cpu`` or the name of the GPU, of one rank."""
    output_dir: str

    num_train_samples: int | None = None
    """None if the data set does not know its length."""
    num_eval_samples: int | None = None
    """None if there is no evaluation, or it does not know its length."""
    offload_optimizer: str | None = None
    """Where the optimizer states are kept (``cpu``, ``nvme``) if not on the device."""
    offload_parameters: str | None = None
    run_name: str | None = None
    """What a person calls the run."""
    resumed_from: str | None = None
    """The checkpoint that the run goes on from."""
    resumed_step: int = 0
    flops_per_token: float | None = None
    """Operations of forward and backward pass for one token, without attention; None where they are not counted."""
    flops_source: str = ""
    """How they are counted."""
    peak_flops: float | None = None
    """Operations a second that one device reaches at best; None where nobody knows."""
    weights: str | None = None
    """Whether they are what the model's files hold; None where they are of no files."""
    number_format: str = ""
    """Format that the peak belongs to."""
    load: LoadReport | None = None
    """What the load of the weights from files took; None where the model came with its weights."""


def header_lines(summary: RunSummary) -> list[str]:
    """The lines of the header, without line ends: a title, then a name and a value a line."""
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
    about_weights = [summary.weights] if summary.weights is not None else []
    about_weights += [load_text(summary.load)] if summary.load is not None else []
    if about_weights:
        rows.insert(1, ("weights", "; ".join(about_weights)))
    if summary.flops_per_token is not None:
        rows.insert(-1, ("compute", _compute(summary)))
    if summary.resumed_from is not None:
        rows.append(("resumed", f"from {summary.resumed_from}, step {summary.resumed_step:,}"))
    width = max(len(name) for name, _ in rows)
    title = "ds_trainer" if summary.run_name is None else f"ds_trainer: {summary.run_name}"
    return [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]


def header_text(summary: RunSummary) -> str:
    """:func:`header_lines` as one text, ready to print."""
    return "\n".join(header_lines(summary))


def load_text(load: LoadReport) -> str:
    """A load of weights in one line, as the header has it."""
    tensors = f"{load.tensors:,} tensors"
    if load.bytes_read:
        text = f"loaded from {load.source}: {tensors}, {human_bytes(load.bytes_read)} read in {load.seconds:.3g} s"
    else:
        text = f"{load.source}: {tensors}, nothing read, in {load.seconds:.3g} s"
    text += f", host peak {human_bytes(load.host_peak_bytes)}"
    if load.device_peak_bytes:
        text += f", device peak {human_bytes(load.device_peak_bytes)}"
    return text


def _compute(summary: RunSummary) -> str:
    assert summary.flops_per_token is not None  # the line is left out
    text = f"{human_operations(summary.flops_per_token)} a token, attention aside ({summary.flops_source})"
    if summary.peak_flops is None:
        return f"{text}; peak of the device unknown, so no MFU"
    return f"{text}; peak {human_operations(summary.peak_flops)}/s in {summary.number_format}"


def _model(summary: RunSummary) -> str:
    total, trainable = summary.parameters_total, summary.parameters_trainable
    text = f"{summary.model_name}, {human_count(total)} parameters"
    if trainable == total:
        return f"{text}, all trainable"
    share = f" ({100 * trainable / total:.3g} %)" if total else ""
    return f"{text}, {human_count(trainable)} trainable{share}"


def _layout(summary: RunSummary) -> str:
    ranks = "rank" if summary.world_size == 1 else "ranks"
    return (
        f"{summary.world_size} {ranks} = dp {summary.data_parallel} x tp {summary.tensor_parallel}"
        f" x cp {summary.context_parallel} x sp {summary.sequence_parallel}"
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
    text = "a stream of unknown length" if train is None else f"{train:,} samples"
    if summary.num_eval_samples is not None:
        text += f", {summary.num_eval_samples:,} for evaluation"
    return text


def _steps(summary: RunSummary) -> str:
    digits = 2 if summary.num_train_epochs >= 0.01 else 4
    epochs = f"{summary.num_train_epochs:.{digits}f}".rstrip("0").rstrip(".")
    unit = "epoch" if epochs == "1" else "epochs"
    return f"{summary.max_steps:,} optimizer steps, {epochs} {unit}"
