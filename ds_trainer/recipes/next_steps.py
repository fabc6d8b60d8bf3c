"""What to do with a trained model: the lines that a run prints when it has ended."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from ds_trainer.recipes.saved_model import SavedModel, find_saved_model
from ds_trainer.recipes.tokenizers import ByteTokenizer
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.printable import shown

_AUTO_CLASSES = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
}
_CAUSAL = "AutoModelForCausalLM"
_SENTENCE_TRANSFORMERS = "modules.json"


def next_steps(directory: str | Path) -> str:
    """How to talk to, load, merge, serve and publish the model in ``directory``, with full paths.

    Raises:
        ConfigError: there is no model, or the base of its adapters is missing.
    """
    path = Path(directory).expanduser().resolve()
    saved = find_saved_model(str(path))
    rows = [("", ["", f"The model is in {path}"])]
    rows += _steps_of_embeddings(path) if (path / _SENTENCE_TRANSFORMERS).is_file() else _steps(path, saved)
    return "\n".join(f"  {name if number == 0 else '':<8} {line}" if name else line
                     for name, lines in rows for number, line in enumerate(lines))  # fmt: skip


def auto_class_of(saved: SavedModel) -> str:
    """Name of the class of transformers that loads the model."""
    name = next(iter(saved.config.get("architectures") or ()), "")
    return next((auto for end, auto in _AUTO_CLASSES.items() if name.endswith(end)), _CAUSAL)


def load_lines(path: Path, saved: SavedModel) -> Iterator[str]:
    """Python that loads the model as ``model``, and its tokenizer or processor if it has one."""
    auto, quoted = auto_class_of(saved), json.dumps(str(path))
    reader = "AutoProcessor" if saved.has_processor else "AutoTokenizer"
    named = "" if saved.is_bytes else f", {reader}"
    if saved.base is not None:
        yield "from peft import PeftModel"
    yield f"from transformers import {auto}{named}"
    if saved.base is None:
        yield f'model = {auto}.from_pretrained({quoted}, dtype="auto")'
    else:
        extra = _labels(path) if auto == "AutoModelForSequenceClassification" else ""
        yield f'base = {auto}.from_pretrained({json.dumps(str(saved.base.resolve()))}, dtype="auto"{extra})'
        yield f"model = PeftModel.from_pretrained(base, {quoted})"
    if not saved.is_bytes:
        where = json.dumps(str(saved.tokenizer_directory.resolve()))
        yield f"{'processor' if saved.has_processor else 'tokenizer'} = {reader}.from_pretrained({where})"


def _labels(path: Path) -> str:
    """The number of classes of a classifier whose base has another head."""
    head = path / "adapter_model.safetensors"
    if not head.is_file():
        return ""
    from safetensors import safe_open

    with safe_open(head, "pt") as file:
        heads = [name for name in list(file.keys()) if "score" in name or "classifier" in name]
        shapes = [file.get_slice(name).get_shape() for name in heads]
    return f", num_labels={shapes[-1][0]}" if shapes else ""


def _steps(path: Path, saved: SavedModel) -> Iterator[tuple[str, list[str]]]:
    quoted = shlex.quote(str(path))
    merged = path.with_name(f"{path.name}-merged")
    generates = auto_class_of(saved) in (_CAUSAL, "AutoModelForImageTextToText")
    if generates:
        yield "talk", [f"ds-trainer chat {quoted}"]
    yield "load", list(load_lines(path, saved))
    if saved.base is not None:
        yield "merge", [f"ds-trainer checkpoint merge {quoted} --to {shlex.quote(str(merged))}"]
    if saved.is_bytes:
        yield "serve", [f"only with ds-trainer chat: the model reads bytes, {ByteTokenizer.FILE_NAME} is its tokenizer"]
    elif generates and saved.base is None:
        yield "serve", [f"vllm serve {quoted}"]
    elif generates and saved.base is not None:
        base, adapters = shlex.quote(str(saved.base.resolve())), shlex.quote(f"{path.name}={path}")
        yield (
            "serve",
            [
                f"vllm serve {shlex.quote(str(merged))}    (after the merge)",
                f"vllm serve {base} --enable-lora --lora-modules {adapters}    (without it)",
            ],
        )
    yield "publish", [_upload(path)]


def _steps_of_embeddings(path: Path) -> Iterator[tuple[str, list[str]]]:
    yield (
        "load",
        [
            "from sentence_transformers import SentenceTransformer",
            f"model = SentenceTransformer({json.dumps(str(path))})",
        ],
    )
    yield "publish", [_upload(path)]


def _upload(path: Path) -> str:
    """The command that uploads the model without the state of its training."""
    return f"hf upload USER/{shlex.quote(path.name)} {shlex.quote(str(path))} . --exclude 'checkpoint-*/*'"


def print_next_steps(directory: str | Path) -> None:
    """Print :func:`next_steps`; a model that cannot be found is no reason to fail a run that has ended well."""
    try:
        print(shown(next_steps(directory)), flush=True)
    except ConfigError as error:
        print(shown(f"\nThe model is in {directory}, but cannot be loaded from there: {error}"), flush=True)
