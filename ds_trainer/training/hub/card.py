"""The model card: the text of a ``README.md`` with metadata for the Hub and a description of the run for readers.

Metadata keys: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_trainer.training.evaluation.outputs import RUNTIME_METRICS

MARKER = (
    "<!-- ds_trainer generated this card from the run. The next push overwrites it. "
    "Remove this comment to keep your own edits. -->"
)
TAG = "generated_from_trainer"
_TEMPLATE = "# Model Card for Model ID"  # the empty template of peft
_METRICS_OF_HUB = (
    "accuracy",
    "bertscore",
    "bleu",
    "cer",
    "chrf",
    "f1",
    "matthews_correlation",
    "mse",
    "pearsonr",
    "perplexity",
    "precision",
    "recall",
    "rouge",
    "sacrebleu",
    "spearmanr",
    "wer",
)
_SECTIONS = ("Model description", "Intended uses & limitations", "Training and evaluation data")


@dataclass(frozen=True)
class CardFacts:
    """The content of a card.

    Attributes:
        model_name: heading.
        language, license, tags, base_model, tasks, library: metadata; empty or None if unknown.
        dataset_tags: names of datasets on the Hub.
        dataset_names: display names of these datasets.
        dataset_args: configuration of each dataset; may be shorter.
        hyperparameters: values by name, in order.
        log_history: the log history of the trainer state.
        versions: versions by package.
    """

    model_name: str
    language: Sequence[str] = ()
    license: str | None = None
    tags: Sequence[str] = ()
    base_model: str | None = None
    tasks: Sequence[str] = ()
    library: str | None = None
    dataset_tags: Sequence[str] = ()
    dataset_names: Sequence[str] = ()
    dataset_args: Sequence[Any] = ()
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    log_history: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def is_generated(text: str) -> bool:
    """Whether a card was written by :func:`card_text`, or is the empty template of peft."""
    return MARKER in text or _TEMPLATE in text


def card_text(facts: CardFacts) -> str:
    """The whole card as markdown."""
    parts = [f"---\n{metadata(facts)}\n---\n{MARKER}", f"# {facts.model_name}", _introduction(facts)]
    parts += [f"## {title}\n\nMore information needed" for title in _SECTIONS]
    parts += ["## Training procedure", "### Training hyperparameters"]
    parts.append("\n".join(f"- {name}: {_shown(value)}" for name, value in facts.hyperparameters.items()))
    table = results_table(facts.log_history)
    if table:
        parts += ["### Training results", table]
    parts.append("### Framework versions")
    parts.append("\n".join(f"- {name} {version}" for name, version in facts.versions.items()))
    return "\n\n".join(parts) + "\n"


def metadata(facts: CardFacts) -> str:
    """The metadata as YAML. A ``model-index`` needs a task and a dataset, so it is left out without them."""
    from huggingface_hub import EvalResult, ModelCardData

    results = last_results(facts.log_history)
    arguments = [*facts.dataset_args, *[None] * len(facts.dataset_tags)]
    entries = [
        EvalResult(
            task_type=task,
            task_name=task.replace("-", " ").title(),
            dataset_type=tag,
            dataset_name=name,
            dataset_args={"config": argument} if argument is not None else None,
            metric_type=metric,
            metric_name=_title(metric),
            metric_value=value,
        )
        for task in facts.tasks
        for tag, name, argument in zip(facts.dataset_tags, facts.dataset_names, arguments, strict=False)
        for metric, value in results.items()
    ]
    data = ModelCardData(
        language=list(facts.language) or None,
        license=facts.license,
        library_name=facts.library,
        tags=[*dict.fromkeys([*facts.tags, TAG])],
        base_model=facts.base_model,
        datasets=list(facts.dataset_tags) or None,
        metrics=[known for known in _METRICS_OF_HUB if any(name.startswith(known) for name in results)] or None,
        model_name=facts.model_name if entries else None,
        eval_results=entries or None,
    )
    return str(data.to_yaml()).strip()


def last_results(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Finite metrics of the last evaluation, without the prefix ``eval_`` and without run times."""
    for entry in reversed(log_history):
        metrics = _metrics(entry)
        if metrics:
            return {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {}


def results_table(log_history: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row for each evaluated step: last logged training loss, epoch, step, metrics. May be empty."""
    rows: dict[Any, dict[str, str]] = {}
    loss: Any = None
    for entry in log_history:
        loss = entry.get("loss", entry.get("distillation_loss", loss))
        metrics = _metrics(entry)
        if metrics:
            row = rows.setdefault(entry.get("step"), {})
            row["Training loss"] = "no log" if loss is None else _shown(loss)
            row["Epoch"], row["Step"] = _shown(entry.get("epoch")), _shown(entry.get("step"))
            row.update({_title(name, validation=True): _shown(value) for name, value in metrics.items()})
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    if not columns:
        return ""
    lines = [columns, ["---:"] * len(columns), *([row.get(name, "") for name in columns] for row in rows.values())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _metrics(entry: Mapping[str, Any]) -> dict[str, float]:
    return {
        name.removeprefix("eval_"): value
        for name, value in entry.items()
        if name.startswith("eval_")
        and not name.endswith(RUNTIME_METRICS)
        and "_mem_" not in name
        and "loss/" not in name
        and isinstance(value, int | float)
    }


def _introduction(facts: CardFacts) -> str:
    if facts.base_model is None:
        text = "This model was trained from scratch"
    else:
        text = f"This model is a fine-tuned version of [{facts.base_model}](https://huggingface.co/{facts.base_model})"
    names = list(facts.dataset_names)
    if names:
        listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        text += f" on {listed}"
    text += "."
    results = last_results(facts.log_history)
    if results:
        text += "\nResults of the last evaluation:\n\n"
        text += "\n".join(f"- {_title(name)}: {_shown(value)}" for name, value in results.items())
    return text


def _title(name: str, validation: bool = False) -> str:
    if validation and name == "loss":
        return "Validation loss"
    title = name.replace("_", " ")
    return title[:1].upper() + title[1:]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
