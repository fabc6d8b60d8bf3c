"""The report of a language-model run: the loss as bits per byte, compared with file compressors.

A language model is a compressor: encoding each token with the model's probability takes ``-log2 p`` bits, so the summed
loss over a text is its code length (Shannon 1948). gzip and xz compress the same text as one stream. Like them, the
model is charged for every byte, and in addition for the separators between documents. The comparison ignores that the
model was trained on other text, and the size of the model.
"""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_trainer.recipes.job import finished_in
from ds_trainer.recipes.language_model import load_language_model
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.tokenizers import Tokenizer
from ds_trainer.samples.sources.documents import Document
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments


def bits_per_byte(loss: float, targets: int, size: int) -> float:
    """Mean loss in nats over ``targets`` tokens that encode ``size`` bytes, as bits per byte."""
    return loss * targets / math.log(2) / size


def nats_per_token(bits: float, targets: int, size: int) -> float:
    """The inverse of :func:`bits_per_byte`: the mean loss in nats per token that corresponds to ``bits`` per byte."""
    return bits * math.log(2) * size / targets


def compression_baselines(text: bytes) -> dict[str, dict[str, float]]:
    """Size of ``text`` compressed as one stream by ``gzip -9`` and ``xz -9e``: bytes and bits per byte, by name."""
    packed = {
        "gzip -9": len(gzip.compress(text, compresslevel=9, mtime=0)),
        "xz -9": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
    }
    return {name: {"bytes": size, "bits_per_byte": 8 * size / len(text)} for name, size in packed.items()}


@dataclass(frozen=True)
class Evaluation:
    """The held-out text and the measurements on it.

    Attributes:
        loss: mean over ``targets``, nats.
        targets: predicted tokens.
        documents: number of held-out documents.
        bytes: their size.
        baselines: what :func:`compression_baselines` returned; empty if not requested.
    """

    loss: float
    targets: int
    documents: int
    bytes: int
    baselines: dict[str, dict[str, float]]

    @property
    def bits_per_byte(self) -> float:
        """The model's code length in bits per byte of the text."""
        return bits_per_byte(self.loss, self.targets, self.bytes)

    def verdict(self) -> str:
        """One sentence: the compressors that the model beats on this text, and those that it does not."""
        beaten = [name for name, packed in self.baselines.items() if self.bits_per_byte < packed["bits_per_byte"]]
        missed = [name for name in self.baselines if name not in beaten]
        if not self.baselines:
            return ""
        if not missed:
            return f"The model beats {' and '.join(beaten)} on held-out text."
        if not beaten:
            return f"The model does NOT beat {' or '.join(missed)} on held-out text; train longer."
        return f"The model beats {' and '.join(beaten)} on held-out text, but not {' or '.join(missed)}."

    def to_dict(self) -> dict[str, Any]:
        """All values, ready for JSON."""
        return {
            "eval_loss": self.loss,
            "eval_perplexity_per_token": math.exp(min(self.loss, 700.0)),
            "bits_per_byte": self.bits_per_byte,
            "eval_target_tokens": self.targets,
            "eval_documents": self.documents,
            "eval_bytes": self.bytes,
            "baselines": {
                name: {**packed, "beaten": self.bits_per_byte < packed["bits_per_byte"]}
                for name, packed in self.baselines.items()
            },
            "verdict": self.verdict(),
        }

    def table(self) -> str:
        """The comparison as text."""
        lines = [f"Held-out text: {counted(self.documents, 'document')}, {self.bytes:,} bytes"]
        rows = [("this model", self.bits_per_byte, f"loss {self.loss:.4f} nats per token")]
        rows += [(name, row["bits_per_byte"], f"{int(row['bytes']):,} bytes") for name, row in self.baselines.items()]
        lines += [f"  {name:<10}  {bits:6.3f} bits per byte   {note}" for name, bits, note in rows]
        return "\n".join([*lines, self.verdict()] if self.baselines else lines)


def report_text(results: Mapping[str, Any], evaluation: Evaluation | None) -> str:
    """The printed report, from the content of ``results.json``."""
    lines = [
        "",
        finished_in(results),
        evaluation.table() if evaluation else "No evaluation: set data.eval or data.held_out_every for one.",
    ]
    return "\n".join([*lines, *last_lines(results)])


def last_lines(results: Mapping[str, Any]) -> Iterator[str]:
    """The end of a report: the sample, if there is one, and where everything is."""
    sample, rule = results["sample"], "-" * 72
    if sample:
        yield from ("", "Sample from the saved model (begins with the prompt):", rule)
        yield from (sample["prompt"] + sample["text"], rule)
    yield f"Weights, logs and results.json are in {results['output_dir']}"


def sample_of(recipe: Recipe, tokenizer: Tokenizer, args: TrainingArguments) -> dict[str, str] | None:
    """The prompt of ``recipe`` and its continuation by the model saved in the output directory; None: not requested.

    The model is loaded from disk in one process. That shows that the saved model can be used, and a model that is
    sharded over ranks needs no collectives.
    """
    spec = recipe.report
    if spec.sample_tokens == 0:
        return None
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a progress bar would interrupt the report
    model = load_language_model(str(args.output_dir)).eval()
    prompt = tokenizer.encode(Document("report.sample_prompt", spec.sample_prompt.encode("utf-8")))
    input_ids = torch.tensor([[tokenizer.separator_id, *prompt.tolist()]])  # documents begin like this in training
    options: dict[str, Any] = {"do_sample": False}
    if spec.sample_temperature > 0:
        options = {"do_sample": True, "temperature": spec.sample_temperature, "top_k": 0}
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(args.seed)
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=spec.sample_tokens,
            pad_token_id=tokenizer.separator_id,
            eos_token_id=tokenizer.separator_id,
            synced_gpus=False,  # under ZeRO-3 transformers would wait for the other ranks
            **options,
        )
    generated = output[0, input_ids.shape[1] :].tolist()
    text = tokenizer.decode(token for token in generated if token != tokenizer.separator_id)
    return {"prompt": spec.sample_prompt, "text": text}
