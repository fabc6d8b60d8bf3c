"""What a language-model run reports at its end: the loss as bits per byte, beside what compressors reach.

A language model is a compressor: coding each token by the model's probability takes ``-log2 p`` bits, so the summed
loss over a text is its code length (Shannon 1948). gzip and xz get the same text as one stream, and like them the model
is charged for every byte; the separators between the documents come on top for the model. What the comparison leaves
out: the model has seen other text before, and its own size is not counted.
"""

from __future__ import annotations

import gzip
import lzma
import math
from dataclasses import dataclass
from typing import Any

from ds_trainer.arguments.recipe import ReportSpec
from ds_trainer.data.readers import Document
from ds_trainer.data.tokenizer import Tokenizer
from ds_trainer.training.language_model import load_language_model


def bits_per_byte(loss: float, targets: int, size: int) -> float:
    """Mean loss in nats over ``targets`` tokens that encode ``size`` bytes, as bits for each byte."""
    return loss * targets / math.log(2) / size


def nats_per_token(bits: float, targets: int, size: int) -> float:
    """The inverse of :func:`bits_per_byte`: the mean loss that ``bits`` per byte correspond to."""
    return bits * math.log(2) * size / targets


def compression_baselines(text: bytes) -> dict[str, dict[str, float]]:
    """What ``gzip -9`` and ``xz -9e`` make of ``text`` as one stream: bytes and bits per byte, by name."""
    packed = {
        "gzip -9": len(gzip.compress(text, compresslevel=9, mtime=0)),
        "xz -9": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
    }
    return {name: {"bytes": size, "bits_per_byte": 8 * size / len(text)} for name, size in packed.items()}


@dataclass(frozen=True)
class Evaluation:
    """The held-out text and what was measured on it.

    Attributes:
        loss: mean over ``targets``, nats.
        targets: predicted tokens.
        documents: number of held-out documents.
        bytes: their size.
        baselines: of :func:`compression_baselines`; empty when not asked for.
    """

    loss: float
    targets: int
    documents: int
    bytes: int
    baselines: dict[str, dict[str, float]]

    @property
    def bits_per_byte(self) -> float:
        """The model's code length in bits for each byte of the text."""
        return bits_per_byte(self.loss, self.targets, self.bytes)

    def verdict(self) -> str:
        """One sentence: which compressors the model beats on this text and which it does not."""
        beaten = [name for name, packed in self.baselines.items() if self.bits_per_byte < packed["bits_per_byte"]]
        missed = [name for name in self.baselines if name not in beaten]
        if not self.baselines:
            return ""
        if not missed:
            return f"The model beats {' and '.join(beaten)} on text that it has not seen."
        if not beaten:
            return f"The model does NOT beat {' or '.join(missed)} on text that it has not seen: train longer."
        return f"The model beats {' and '.join(beaten)} on text that it has not seen, but not {' or '.join(missed)}."

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, ready for JSON."""
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
        """The comparison in lines of text."""
        lines = [f"Held-out text: {self.documents:,} documents, {self.bytes:,} bytes"]
        rows = [("this model", self.bits_per_byte, f"loss {self.loss:.4f} nats a token")]
        rows += [(name, row["bits_per_byte"], f"{int(row['bytes']):,} bytes") for name, row in self.baselines.items()]
        lines += [f"  {name:<10}  {bits:6.3f} bits per byte   {note}" for name, bits, note in rows]
        return "\n".join([*lines, self.verdict()] if self.baselines else lines)


def report_text(results: dict[str, Any], evaluation: Evaluation | None) -> str:
    """The report that is printed at the end, from the content of ``results.json``."""
    seconds = results["seconds"]
    lines = [
        "",
        f"{results['steps']:,} steps in {seconds['train']:.0f} s; with preparation {seconds['prepare']:.0f} s, "
        f"evaluation {seconds['evaluate']:.0f} s and the rest {seconds['total']:.0f} s",
        evaluation.table() if evaluation else "Nothing is held out: no evaluation (data.eval or data.held_out_every).",
    ]
    if results["sample"]:
        lines += ["", "A sample of the saved model (the prompt is its first part):", "-" * 72]
        lines += [results["sample"]["prompt"] + results["sample"]["text"], "-" * 72]
    return "\n".join([*lines, f"Weights, records and results.json are in {results['output_dir']}"])


def generate_sample(directory: str, tokenizer: Tokenizer, spec: ReportSpec, seed: int) -> str | None:
    """Text that the model saved in ``directory`` continues ``spec.sample_prompt`` with, or None when none is asked for.

    It is loaded from disk on purpose, on one process: so it is shown that what was saved can be used, and a model
    whose weights are spread over ranks needs nobody else.
    """
    if spec.sample_tokens == 0:
        return None
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a bar for loading a dozen tensors only tears the report apart
    model = load_language_model(directory).eval()
    prompt = tokenizer.encode(Document("report.sample_prompt", spec.sample_prompt.encode("utf-8")))
    input_ids = torch.tensor([[tokenizer.separator_id, *prompt.tolist()]])  # as a document begins in training
    options: dict[str, Any] = {"do_sample": False}
    if spec.sample_temperature > 0:
        options = {"do_sample": True, "temperature": spec.sample_temperature, "top_k": 0}
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=spec.sample_tokens,
            pad_token_id=tokenizer.separator_id,
            eos_token_id=tokenizer.separator_id,
            synced_gpus=False,  # under ZeRO 3 transformers would wait for ranks that generate nothing
            **options,
        )
    generated = output[0, input_ids.shape[1] :].tolist()
    return tokenizer.decode(token for token in generated if token != tokenizer.separator_id)
