"""The task ``sft`` without samples: trains a language model on text, all of it, in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from ds_trainer.callbacks.metrics_recorder import MetricsFileCallback
from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.distillation import trainer_class_of
from ds_trainer.recipes.job import Job, final_evaluation
from ds_trainer.recipes.language_model import build_language_model, language_model_config, tokenizer_of
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.report import Evaluation, compression_baselines, nats_per_token, report_text, sample_of
from ds_trainer.recipes.tokenizers import Tokenizer
from ds_trainer.samples.sources.documents import Document, read_documents
from ds_trainer.samples.sources.files import DOCUMENT_SUFFIXES, SourceFile, find_files
from ds_trainer.samples.sources.record import BadLines
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.trainer import Trainer


class LanguageModelJob(Job):
    """Trains the language model of a recipe on text in blocks.

    Attributes:
        tokenizer, model_config, train, train_blocks: what :meth:`prepare` has read.
        eval, eval_blocks, eval_text: the same of evaluation; None and no bytes without evaluation data.
        baselines: compressed sizes of ``eval_text``, on the main process if the recipe asks for them.
    """

    tokenizer: Tokenizer
    model_config: PretrainedConfig
    train: TokenStream
    train_blocks: TokenBlocks
    eval: TokenStream | None = None
    eval_blocks: TokenBlocks | None = None
    eval_text: bytes = b""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.baselines: dict[str, dict[str, float]] = {}

    def prepare(self, args: TrainingArguments) -> Sequence[str]:
        """Read the corpus and tokenize it; read the model's configuration."""
        recipe, problems = self.recipe, self.problems
        with problems.collecting():
            corpus = Corpus(recipe.data)
        with problems.collecting():
            self.tokenizer = tokenizer_of(recipe)
            self.model_config = language_model_config(recipe, self.tokenizer)
        problems.raise_if_any()
        length = recipe.data.sequence_length
        self.train = tokenize(corpus.train_documents(), self.tokenizer)
        if self.train.documents == 0:
            raise ConfigError(f"data.train: there is no text in {counted(len(corpus.train_files), 'file')}.")
        self.train_blocks = TokenBlocks(self.train.tokens, length)
        if not corpus.has_eval:
            return ()
        documents = list(corpus.eval_documents())
        if not documents:
            raise ConfigError(
                "data: the evaluation data has no text; set data.eval to other files, or use held_out_every."
            )
        self.eval = tokenize(documents, self.tokenizer)
        self.eval_blocks = TokenBlocks(self.eval.tokens, length, keep_ragged=True)
        self.eval_text = b"".join(document.data for document in documents)
        return ()

    def make_trainer(self, args: TrainingArguments) -> Trainer:
        """The Trainer, perhaps with a teacher."""
        model = build_language_model(self.recipe, self.model_config, args.seed, args.allow_new_weights)
        return trainer_class_of(self.recipe, self.tokenizer, args)(
            model,
            args,
            train_dataset=self.train_blocks,
            eval_dataset=self.eval_blocks,
            processing_class=self.tokenizer,  # saved in every checkpoint, and with the final weights
        )

    def begin(self, trainer: Trainer) -> None:
        """Add what compressors achieve to the loss plot as horizontal lines, in nats per token."""
        text = self.eval
        if text is None or not self.recipe.report.compression_baselines or not trainer.is_world_process_zero():
            return
        self.baselines = compression_baselines(self.eval_text)
        for callback in trainer.callback_handler.own:
            if isinstance(callback, MetricsFileCallback):
                callback.baselines = {
                    name: nats_per_token(packed["bits_per_byte"], text.targets, text.bytes)
                    for name, packed in self.baselines.items()
                }

    def evaluate(self, trainer: Trainer) -> Evaluation | None:
        """The loss on the held-out text, compared with the baselines."""
        text = self.eval
        if text is None:
            return None
        return Evaluation(
            final_evaluation(trainer)["eval_loss"], text.targets, text.documents, text.bytes, self.baselines
        )

    def figures(self, trainer: Trainer, evaluation: Evaluation | None) -> Mapping[str, Any]:
        """Sizes of the text, the evaluation, and a sample."""
        return {
            "train_documents": self.train.documents,
            "train_bytes": self.train.bytes,
            "evaluation": evaluation.to_dict() if evaluation else None,
            "sample": sample_of(self.recipe, self.tokenizer, trainer.args),
        }

    def report(self, results: Mapping[str, Any], evaluation: Evaluation | None) -> str:
        """The comparison with the baselines, and the sample."""
        return report_text(results, evaluation)


# Text as blocks of a fixed number of tokens, in which every token is a target exactly once.
#
# The documents are concatenated, each after a separator token::
#
#     <sep> d0 d0 d0 <sep> d1 d1 ...
#
# and divided into blocks of ``sequence_length`` tokens that overlap by one token::
#
#     block 0: t0 t1 t2 t3            A causal language model shifts the labels: the first token of a block is context,
# block 1:          t3 t4 t5 t6   every other token is a target. So t1, t2, ... are targets once; t0 is the separator.
#
# Hence the loss summed over all blocks is the model's code length of the whole text (all bytes, plus the separators
# between documents), from which bits per byte follow.


class CorpusFile(NamedTuple):
    """A file, and the key of the text in its rows."""

    file: SourceFile
    text_key: str

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.file.path


class Corpus:
    """The documents for training and for evaluation.

    It finds the files of a :class:`~ds_trainer.recipes.data_spec.DataSpec` and selects the held-out ones before it
    reads any. The order of documents depends on the paths only: sources in the order of the recipe, files of a
    directory by relative path. So every rank and every later run reads the same documents in the same order.

    Attributes:
        bad_lines: what was wrong in the files that were read.

    Raises:
        ConfigError: a path matches nothing, or no training data is left; lists all problems.
    """

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        self.bad_lines = BadLines(spec.bad_lines)
        problems: list[str] = []
        self.eval_files = self._find_all("eval", problems)
        train_files = self._find_all("train", problems)
        held_out = {file.path.resolve() for file in self.eval_files}
        self.train_files = [file for file in train_files if file.path.resolve() not in held_out]
        if train_files and not self.train_files:
            problems.append(
                f"data.train: no training data: {counted(len(train_files), 'file is', 'files are')} also in data.eval."
            )
        if problems:
            raise ConfigError(problems)

    @property
    def has_eval(self) -> bool:
        """Whether there is evaluation data."""
        return bool(self.eval_files) or self.spec.held_out_every is not None

    def train_documents(self) -> Iterator[Document]:
        """Training documents, without held-out and empty ones.

        Raises:
            ConfigError: at the end, if there were bad lines that the recipe does not allow; lists them.
        """
        return self._documents(self.train_files, held_out=False if self.spec.held_out_every else None)

    def eval_documents(self) -> Iterator[Document]:
        """Evaluation documents, without empty ones.

        Raises:
            ConfigError: what :meth:`train_documents` refuses.
        """
        if self.spec.held_out_every:
            return self._documents(self.train_files, held_out=True)
        return self._documents(self.eval_files, held_out=None)

    def _documents(self, files: list[CorpusFile], held_out: bool | None) -> Iterator[Document]:
        """The documents of ``files``: all, or with ``held_out`` only those on that side of the split."""
        every = self.spec.held_out_every or 1
        self.bad_lines = BadLines(self.spec.bad_lines)
        index = 0
        for file, text_key in files:
            if file.format == "text" and held_out is not None and (index % every == 0) is not held_out:
                index += 1  # one document: its side of the split is known before it is read
                continue
            for document in read_documents(file, text_key, self.bad_lines):
                wanted = held_out is None or (index % every == 0) is held_out
                index += 1
                if wanted and document is not None and document.data:
                    yield document
        self.bad_lines.check()

    def _find_all(self, split: Literal["train", "eval"], problems: list[str]) -> list[CorpusFile]:
        """The files of a split in order, each once."""
        files: dict[Path, CorpusFile] = {}
        for key, spec in self.spec.sources(split):
            try:
                for file in find_files(spec, key, DOCUMENT_SUFFIXES):
                    files.setdefault(file.path.resolve(), CorpusFile(file, spec.text_key or "text"))
            except ConfigError as error:
                problems += error.problems
        return list(files.values())


@dataclass(frozen=True)
class TokenStream:
    """Documents as one sequence of tokens.

    Attributes:
        tokens: uint16 or uint32 of shape [tokens].
        documents: number of documents.
        bytes: their size without separators.
    """

    tokens: np.ndarray
    documents: int
    bytes: int

    @property
    def targets(self) -> int:
        """Number of target tokens: all but the first, which is a separator."""
        return max(len(self.tokens) - 1, 0)


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenStream:
    """All ``documents`` concatenated, each after the tokenizer's separator."""
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    separator = np.asarray([tokenizer.separator_id], dtype=kind)
    arrays: list[np.ndarray] = []
    count = size = 0
    for document in documents:
        arrays += (separator, tokenizer.encode(document).astype(kind, copy=False))
        count += 1
        size += len(document.data)
    return TokenStream(np.concatenate(arrays) if arrays else np.empty(0, kind), count, size)


class TokenBlocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Blocks of ``sequence_length`` tokens that overlap by one token; see the module docstring.

    Args:
        tokens: unsigned integers of shape [tokens].
        sequence_length: tokens per block, 2 or more.
        keep_ragged: keep the incomplete last block, padded with id 0 and label -100, so that evaluation covers every
            token. Padding is on the right, where a causal model cannot attend to it from a real token, so no attention
            mask is needed.

    A sample is ``{"input_ids": int64[sequence_length], "labels": int64[sequence_length]}``, labels not shifted.

    Raises:
        ConfigError: the tokens do not fill a block (with ``keep_ragged``: there is no target).
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, *, keep_ragged: bool = False) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self._stride = sequence_length - 1
        targets = max(len(tokens) - 1, 0)
        self._blocks = -(-targets // self._stride) if keep_ragged else targets // self._stride
        if self._blocks == 0:
            raise ConfigError(
                f"data: {len(tokens)} tokens are too few for samples of data.sequence_length={sequence_length}; "
                "use more text or a shorter length."
            )

    def __len__(self) -> int:
        return self._blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._blocks:
            raise IndexError(f"block {index} of {self._blocks}")
        start = index * self._stride
        block = self.tokens[start : start + self.sequence_length]
        input_ids = torch.zeros(self.sequence_length, dtype=torch.int64)
        input_ids[: len(block)] = torch.from_numpy(block.astype(np.int64))
        labels = input_ids.clone()
        labels[len(block) :] = -100
        return {"input_ids": input_ids, "labels": labels}
