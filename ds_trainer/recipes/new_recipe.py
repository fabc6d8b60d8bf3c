"""Writes the text of a new recipe: values that suit the model, the data and the devices, each with its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_trainer.planner.plan import Plan
from ds_trainer.planner.planned_model import bitsandbytes_bytes
from ds_trainer.planner.search import Goal, search, unsharded_stage
from ds_trainer.recipes import schema
from ds_trainer.recipes.data_survey import IMAGES, DataSurvey
from ds_trainer.recipes.devices import Devices
from ds_trainer.recipes.starting_model import StartingModel
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.host_memory import total_host_memory
from ds_trainer.utils.units import counted

TASKS = {
    "full": "fine-tune all weights on conversations, prompts with completions, or texts",
    "lora": "fine-tune LoRA adapters on them",
    "qlora": "fine-tune LoRA adapters on a base in 4 bits",
    "pretrain": "continue the pre-training on text, in blocks of equal length",
    "vision_language": "fine-tune a vision-language model on conversations with images",
    "dpo": "prefer chosen answers over rejected ones (TRL)",
    "reward": "a reward model from chosen and rejected answers (TRL)",
    "classification": "a classifier of labeled texts",
    "embedding": "an embedding model from pairs, triplets, or pairs with scores (sentence-transformers)",
}
"""What a new recipe can do."""

_KINDS = {
    **dict.fromkeys(("full", "lora", "qlora"), ("messages", "prompt_completion", "text")),
    "pretrain": ("text",),
    "vision_language": (IMAGES, "messages", "prompt_completion"),
    **dict.fromkeys(("dpo", "reward"), ("preference",)),
    "classification": ("classification",),
    "embedding": ("embedding",),
}
_OF_TEXT = ("full", "lora", "qlora", "pretrain")
_ONE_EACH: tuple[tuple[str, object], ...] = (("tp", 1), ("cp", 1), ("sp", 1))  # images are not divided
_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_LORA_RANK = 16
_SMALL_MODEL = 100e6  # parameters; models below it need larger steps than pretrained ones
_SEQUENCES = 32  # of an optimizer step
_LONGEST = 8192
_TRAINING_BYTES = 16  # of a parameter in float32 with Adam: weight, gradient, two moments


@dataclass(frozen=True)
class Wanted:
    """What a recipe is for, completed and checked.

    Attributes:
        model: that is trained.
        data: paths.
        survey: what is known of the data.
        devices: where it runs.
        output: output directory.
        teacher: directory or Hub name of a model whose distribution is learned, for fine-tuning.
    """

    model: StartingModel
    data: tuple[str, ...]
    survey: DataSurvey
    devices: Devices
    output: str
    teacher: str | None = None

    @property
    def positions(self) -> int:
        """The longest sequence of the model."""
        return self.model.planned().max_length or _LONGEST


def check_task(task: str, wanted: Wanted) -> None:
    """Raise if the data is not for ``task``.

    Raises:
        ConfigError: it is for other tasks, which the message names.
    """
    kind, model = wanted.survey.kind, wanted.model
    if wanted.teacher is not None and task not in ("full", "lora", "qlora", "pretrain"):
        raise ConfigError(f"--teacher {wanted.teacher} is for full, lora, qlora and pretrain, not for --task {task}.")
    if kind not in _KINDS[task]:
        fitting = [name for name, kinds in _KINDS.items() if kind in kinds]
        raise ConfigError(
            f"--task {task} needs data of the kind {' or '.join(_KINDS[task])}, but {', '.join(wanted.data)} has "
            f"{wanted.survey.format}. It is data for {', '.join(fitting)}."
        )
    of_type = f"a model of type {model.config.get('model_type')!r}"
    if task == "vision_language" and not model.takes_images:
        raise ConfigError(f"--task {task}: {of_type} ({model.name}) takes no images.")
    if task in _OF_TEXT and model.takes_images and not model.is_causal:
        raise ConfigError(f"--task {task}: {of_type} is trained with --task vision_language, also on text alone.")


def default_task(wanted: Wanted) -> tuple[str, str]:
    """The task that the data is for and that fits the devices, and why."""
    by_kind = {"preference": "dpo", "text": "pretrain", IMAGES: "vision_language"}
    by_kind |= {kind: kind for kind in ("classification", "embedding")}
    if wanted.survey.kind in by_kind:
        return by_kind[wanted.survey.kind], f"the data has {wanted.survey.format}"
    if wanted.model.is_bytes:
        return "full", "the model reads bytes"
    if wanted.model.takes_images and not wanted.model.is_causal:
        return "vision_language", "the model is one for images and text"
    if wanted.devices.cluster is None:
        needed = f"{wanted.model.planned().total * _TRAINING_BYTES / 1e9:.1f} GB with their optimizer"
        if _fits_on_cpus(wanted):
            return "full", f"all weights need {needed}, which this machine has"
        return "lora", f"all weights would need {needed}"
    if _plan("full", wanted, 0) is not None:
        return "full", f"all weights fit on {wanted.devices.text}"
    if _plan("lora", wanted, _LORA_RANK) is not None:
        return "lora", f"all weights do not fit on {wanted.devices.text}, adapters do"
    return "qlora", f"the weights do not fit on {wanted.devices.text} in 16 bits"


def supervised_task(wanted: Wanted) -> str:
    """The way to fine-tune on answers, texts or images that fits the devices; for data of other kinds, too."""
    kind = IMAGES if wanted.survey.kind == IMAGES else "messages"
    return default_task(replace(wanted, survey=replace(wanted.survey, kind=kind)))[0]


def _fits_on_cpus(wanted: Wanted) -> bool:
    return wanted.model.planned().total * _TRAINING_BYTES < total_host_memory() / 2


def has_adapters(task: str, wanted: Wanted) -> bool:
    """Whether adapters are trained: where the task says so, and on images where all weights would need the host."""
    if task != "vision_language":
        return task in ("lora", "qlora")
    if wanted.devices.cluster is None:
        return not _fits_on_cpus(wanted)
    whole = _plan(task, wanted, 0)
    return whole is None or whole.candidate.offload_optimizer


def _plan(task: str, wanted: Wanted, rank: int) -> Plan | None:
    """The fastest plan that fits, with adapters of ``rank``; None on CPUs, or if none fits."""
    if wanted.devices.cluster is None:
        return None
    model, ranks = wanted.model.planned(rank), wanted.devices.ranks
    fixed: tuple[tuple[str, object], ...] = _ONE_EACH if task == "vision_language" else ()
    if task == "qlora":
        model, fixed = model.quantized(bitsandbytes_bytes(_FOUR_BITS)), (("stage", unsharded_stage(ranks)), ("tp", 1))
    batch = -(-_SEQUENCES // ranks) * ranks
    length = length_of(wanted)
    for goal in (Goal(length, batch, fixed=fixed), Goal(length, fixed=fixed)):
        best = search(model, wanted.devices.cluster, goal).best
        if best is not None:
            return best
    return None


def length_of(wanted: Wanted) -> int:
    """Tokens of a sample: the power of two that 99 % of the samples do not exceed, up to the model's positions."""
    wish = 128
    while wish < wanted.survey.percentile(0.99) and wish < _LONGEST:
        wish *= 2
    return min(wish, wanted.positions)


def recipe_text(task: str, wanted: Wanted, path: str) -> str:
    """The recipe as YAML with comments."""
    adapters = has_adapters(task, wanted)
    plan = _plan(task, wanted, _LORA_RANK if adapters else 0)
    lines = [
        f"# yaml-language-server: $schema={Path(schema.__file__).with_name(schema.SCHEMA_FILE)}",
        f"# {wanted.model.name}: {TASKS[task]}. Written by ds-trainer init; every value can be changed.",
        f"# Start:  {wanted.devices.command(path)}",
        f"# Data:   {wanted.survey.describe()}",
        *(f"# {line}" for line in _plan_lines(task, wanted, plan)),
    ]
    lines = [" ".join(line.splitlines()) for line in lines]  # names of files may have newlines
    sections = {
        "model": _model(task, wanted, adapters),
        "task": _task(task, wanted),
        "data": _data(task, wanted),
        "arguments": _arguments(task, wanted, plan, adapters),
        "report": _report(task),
        "distillation": _distillation(wanted),
    }
    for name, entries in sections.items():
        rows = list(entries)
        if rows:
            lines += ["", f"{name}:", *(_line(*row) for row in rows)]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any, reason: str = "") -> str:
    indent = "  " * (1 + key.count("."))
    name = key.rpartition(".")[2]
    text = "" if value is None else f" {value if _is_plain(value) else json.dumps(value, ensure_ascii=False)}"
    return f"{indent}{name}:{text}{f'  # {reason}' if reason else ''}"


def _is_plain(value: Any) -> bool:
    """Whether a text needs no quotes in YAML, or is a number that needs to stay one."""
    if not isinstance(value, str):
        return False
    if re.fullmatch(r"[1-9]e-[1-9]", value):
        return True
    if value in ("no", "yes", "on", "off", "true", "false", "null") or value.strip() != value:
        return False
    return (
        all(char.isalnum() or char in "_-./+" for char in value) and not value[:1].isdigit() and value[:1] not in "-.+"
    )


def _plan_lines(task: str, wanted: Wanted, plan: Plan | None) -> Iterator[str]:
    if plan is not None:
        memory, room = plan.memory.device / 1e9, plan.cluster.board.memory
        yield (
            f"Plan:   {wanted.devices.text}: {memory:.1f} of {room:.0f} GB on each device, "
            f"about {plan.seconds:.1f} s a step, {plan.tokens_per_second:,.0f} tokens a second (estimates)"
        )
    elif wanted.devices.cluster is None:
        yield "Plan:   this machine's CPUs, one rank"
    else:
        command = f"ds-trainer plan {wanted.model.name}"
        yield f"Plan:   does NOT fit on {wanted.devices.text} by estimate; '{command}' shows why"


def _model(task: str, wanted: Wanted, adapters: bool) -> Iterator[tuple[Any, ...]]:
    yield "path", wanted.model.name
    if task == "vision_language":
        yield "freeze", ["vision_tower"], "is not trained; or projector, language_model, or patterns of names"
    if adapters:
        yield "peft", None, "only these adapters are trained and saved"
        yield "peft.peft_type", "LORA"
        yield "peft.r", _LORA_RANK, "rank: more learns more, and takes more memory"
        yield "peft.lora_alpha", 2 * _LORA_RANK
        yield "peft.lora_dropout", 0.0
        yield "peft.target_modules", "all-linear"
    if task == "qlora":
        compute = "float32" if wanted.devices.cluster is None else "bfloat16"
        yield "quantization", None, "the base in 4 bits (bitsandbytes)"
        for name, value in _FOUR_BITS.items():
            yield f"quantization.{name}", value
        yield "quantization.bnb_4bit_compute_dtype", compute


def _task(task: str, wanted: Wanted) -> Iterator[tuple[Any, ...]]:
    if task in ("vision_language", "dpo", "reward", "classification", "embedding"):
        yield "name", task
    if task == "embedding":
        yield "options", None, "fields of SentenceTransformerTrainingArguments, and loss, mini_batch_size"
        yield "options.batch_sampler", "no_duplicates", "other texts of a batch are negatives"
    if task == "dpo":
        yield "options", None, "fields of TRL's DPOConfig"
        yield "options.beta", 0.1, "lower: the model may go further from where it began"
    if task == "classification" and wanted.survey.label_key != "label":
        yield "options", None
        yield "options.label_key", wanted.survey.label_key


def _data(task: str, wanted: Wanted) -> Iterator[tuple[Any, ...]]:
    yield "train", list(wanted.data)
    small = wanted.survey.samples < 1000
    if task == "pretrain":
        yield "held_out_every", 10 if small else 50, "every N-th document is for evaluation"
        yield "sequence_length", min(wanted.positions, 2048), "tokens of a block; documents are cut, not padded"
        return
    yield "held_out", 0.1 if small else 0.05, "share of the samples for evaluation"
    length = length_of(wanted)
    longer = sum(1 for size in wanted.survey.lengths if size > length)
    reason = (
        f"longer: {longer:,} of {counted(len(wanted.survey.lengths), 'sample')}" if longer else "no sample is longer"
    )
    yield "max_length", length, f"tokens{', with those of images' if wanted.survey.kind == IMAGES else ''}; {reason}"
    if task in ("full", "lora", "qlora", "vision_language"):
        if task == "vision_language":
            yield "long_samples", "drop", "or error, or truncate: text behind the last image"
        elif longer:
            yield "long_samples", "truncate", "or drop, split (text), error"
        if wanted.survey.kind in ("messages", IMAGES):
            if task != "vision_language" and not wanted.model.has_template:
                yield "chat_template", "chatml", "the model's tokenizer has none"
            yield "train_on", "assistant", "only answers are learned; or last_turn, all, a list of roles"
    if wanted.survey.bad_lines:
        yield "bad_lines", "skip", f"{counted(wanted.survey.bad_lines, 'line')} cannot be used"


def _arguments(task: str, wanted: Wanted, plan: Plan | None, adapters: bool) -> Iterator[tuple[Any, ...]]:
    yield "output_dir", wanted.output
    yield "num_train_epochs", 3 if wanted.survey.samples < 50_000 else 1
    rate, why = _learning_rate(task, wanted, adapters)
    yield "learning_rate", rate, why
    yield "lr_scheduler_type", "cosine"
    yield "warmup_steps", 0.05, "share of all steps"
    if plan is not None:
        yield from plan.candidate.arguments().items()
    else:
        yield "per_device_train_batch_size", 4, "samples at a time; more is faster until memory ends"
        # A small dataset gets smaller steps, so that there are enough of them to learn in.
        sequences = next((size for size in (8, 16) if wanted.survey.samples < 50 * size), _SEQUENCES)
        accumulation = max(1, sequences // 4 // wanted.devices.ranks)
        yield (
            "gradient_accumulation_steps",
            accumulation,
            f"an optimizer step has {4 * accumulation * wanted.devices.ranks}",
        )
        yield from _without_plan(task, wanted)
    samples_per_row = length_of(wanted) // max(1, wanted.survey.percentile(0.5))
    if task in ("full", "lora", "qlora") and samples_per_row >= 4:
        yield "packing", True, "short samples share a row, without seeing each other"
    if task == "vision_language" and wanted.devices.cluster is not None:
        yield "dataloader_num_workers", 4, "they read and resize the images of the next batches"
    yield "logging_steps", 10
    yield "eval_strategy", "epoch"
    yield "save_strategy", "epoch"
    yield "save_total_limit", 2, "newest checkpoints; --arguments.auto_resume true resumes a run that was stopped"


def _without_plan(task: str, wanted: Wanted) -> Iterator[tuple[Any, ...]]:
    if wanted.devices.cluster is None:
        yield "use_cpu", True
        if task in ("dpo", "reward"):
            yield "bf16", False, "TRL's default is true"
        return
    yield "bf16", True
    yield "activation_checkpointing", True
    yield "zero_stage", 2 if task == "qlora" else 3, "4-bit weights cannot be sharded" if task == "qlora" else ""


def _learning_rate(task: str, wanted: Wanted, adapters: bool) -> tuple[str, str]:
    if wanted.model.planned().total < _SMALL_MODEL and task in (*_OF_TEXT, "vision_language"):
        return "1e-3", "the model is small"
    rates = {
        "full": "1e-5",
        "vision_language": "1e-5",
        "pretrain": "2e-5",
        "dpo": "1e-6",
        "reward": "1e-5",
        "classification": "2e-5",
        "embedding": "2e-5",
    }
    return "2e-4" if adapters else rates[task], "lower it if the loss of evaluation rises"


def _report(task: str) -> Iterator[tuple[Any, ...]]:
    if task == "pretrain":
        yield "compression_baselines", False
        yield "sample_tokens", 0


def _distillation(wanted: Wanted) -> Iterator[tuple[Any, ...]]:
    if wanted.teacher is not None:
        yield "teacher", wanted.teacher, "a larger model with the same tokenizer; its memory is not in the plan"
        yield "temperature", 1.0, "above 1, unlikely tokens count more"
        yield "hard_loss_weight", 0.1, "of the loss against the data; the rest is that against the teacher"
        yield "divergence", "forward_kl", "or reverse_kl"
