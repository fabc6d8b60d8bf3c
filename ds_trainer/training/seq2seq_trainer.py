"""``Seq2SeqTrainer``: a Trainer whose evaluations generate text, for metrics of whole texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer.arguments.compat.library_arguments import own_arguments
from ds_trainer.arguments.seq2seq_training_arguments import Seq2SeqTrainingArguments
from ds_trainer.parallel.layout import Coordinates
from ds_trainer.training.assembly import Assembly
from ds_trainer.training.evaluation.labels import labels_of
from ds_trainer.training.evaluation.nested import detached
from ds_trainer.training.evaluation.outputs import EvalLoopOutput, PredictionOutput
from ds_trainer.training.generation.generation_phase import read_generation_config
from ds_trainer.training.loading.model_argument import resolve_model
from ds_trainer.training.loop.device_copies import on_device
from ds_trainer.training.model.micro_batch_rng import micro_batch_rng, seed_of_micro_batches
from ds_trainer.training.trainer import Trainer
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import fails_together

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig


_DEFAULT_LENGTH = 20
"""The default maximum length of transformers."""


class Seq2SeqAssembly(Assembly):
    """The machinery of a :class:`Seq2SeqTrainer`: also its settings of generation."""

    def __init__(self, trainer: Any, *rest: Any) -> None:
        super().__init__(trainer, *rest)
        given = self.args.generation_config
        self._config = None if given is None else trainer.load_generation_config(given)
        self._keywords: dict[str, Any] | None = None
        self._batches = 0
        self._evaluation: ExitStack | None = None  # contexts that stay open during an evaluation

    @property
    def args(self) -> Seq2SeqTrainingArguments:
        """The training arguments; during a trial, those of the trial."""
        return cast(Seq2SeqTrainingArguments, self.events.args)

    def module_of(self, given: Any) -> nn.Module:
        """As a Trainer's, with the generation configuration of the arguments."""
        self.engines.load_report = None
        model: Any = resolve_model(given, self.args, self.peft_config, for_generation=True)
        if self.args.predict_with_generate and not callable(getattr(model, "generate", None)):
            raise ConfigError(
                f"predict_with_generate=True, but {type(model).__name__} has no method generate. Set it to False, or "
                "pass a model that generates, such as a transformers model with a language modeling head."
            )
        if self._config is not None:
            model.generation_config = deepcopy(self._config)
        return cast(nn.Module, model)

    @contextmanager
    def generating_with(self, given: dict[str, Any]) -> Iterator[None]:
        """Generate with the keywords ``given`` and those of the arguments inside."""
        outer, self._keywords = self._keywords, self._with_arguments(given)
        try:
            yield
        finally:
            self._keywords = outer

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of one evaluation: weights gathered for generation stay gathered until it ends."""
        self._batches = 0
        outer = self._evaluation
        try:
            with ExitStack() as self._evaluation:
                yield
        finally:
            self._evaluation = outer

    def _with_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Keywords of ``generate``: those ``given``, completed by those of the arguments."""
        keywords = {k: v for k, v in given.items() if v is not None or k not in ("max_length", "num_beams")}
        if "max_length" not in keywords and keywords.get("max_new_tokens") is None:
            keywords["max_length"] = self.args.generation_max_length
        keywords.setdefault("num_beams", self.args.generation_num_beams)
        return {k: v for k, v in keywords.items() if v is not None or k not in ("max_length", "num_beams")}

    def generate(self, inputs: dict[str, Any], given: dict[str, Any]) -> torch.Tensor:
        """Tokens ``[samples, length]`` for a batch, with the keywords ``given``, else those of the evaluation."""
        keywords = self._with_arguments(given) if given or self._keywords is None else self._keywords
        prepared = self.trainer._prepare_inputs(inputs)
        labels, own = prepared.get("labels"), prepared.get("decoder_input_ids")
        if labels is not None and own is not None and labels.shape == own.shape:
            # The collator made them from the labels: the model would continue the answer instead of generating it.
            prepared = {k: v for k, v in prepared.items() if k not in ("decoder_input_ids", "decoder_attention_mask")}
        phase = self.engines.generation
        sharded = self.compiled.zero_stage == 3 and not (phase is not None and phase.gathered)
        keywords = {"synced_gpus": sharded and distributed.world_size() > 1, **keywords}
        # The ranks of a replica must draw the same tokens where they are sampled: its place alone decides.
        place = Coordinates(self.layout.coordinates(distributed.rank()).dp, 0, 0, 0)
        self._batches += 1
        seed = seed_of_micro_batches(self.args, self.layout)
        model: Any = self.trainer.model
        with micro_batch_rng(seed, place, self.events.state.global_step, -self._batches):
            generated = model.generate(**prepared, **keywords)
        return cast(torch.Tensor, getattr(generated, "sequences", generated))

    @contextmanager
    def weights_at_hand(self) -> Iterator[None]:
        """With ZeRO-3, gather all weights inside if ``generation_gather`` says so; in an evaluation until its end.
        Collective at the first batch.
        """
        with ExitStack() as step:
            stack = step if self._evaluation is None else self._evaluation
            if self.engines.generation is not None:
                stack.enter_context(self.engines.generation.weights())
            yield


class Seq2SeqTrainer(Trainer):
    """A :class:`Trainer` that can generate in :meth:`evaluate` and :meth:`predict` (``predict_with_generate``).

    Keywords of those methods override ``generation_max_length`` and ``generation_num_beams``, which override
    ``generation_config``, which replaces the model's own. Models are encoder-decoders or decoder-only; for the latter,
    batches contain prompts, and predictions begin with them.

    Takes the arguments of :class:`Trainer`; ``args`` are :class:`Seq2SeqTrainingArguments`.

    Raises:
        ConfigError: as :class:`Trainer`; the generation configuration is invalid, or the model cannot generate.

    Source of names and meanings: transformers 5, ``transformers.Seq2SeqTrainer``.
    """

    args: Seq2SeqTrainingArguments
    _ds_trainer: Seq2SeqAssembly
    _ds_assembly = Seq2SeqAssembly

    def __init__(
        self,
        model: nn.Module | str | os.PathLike[str] | PretrainedConfig | None = None,
        args: Seq2SeqTrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        peft_config: Any = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        args = Seq2SeqTrainingArguments("tmp_trainer") if args is None else own_arguments(args)
        if not isinstance(args, Seq2SeqTrainingArguments):
            raise ConfigError(
                f"args is a {type(args).__name__}, but Seq2SeqTrainer needs generation arguments. Pass "
                "Seq2SeqTrainingArguments."
            )
        super().__init__(
            model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            peft_config=peft_config,
            tokenizer=tokenizer,
        )

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> GenerationConfig:
        """The configuration that ``generation_config`` describes: an object, its fields, or a location.

        Raises:
            ConfigError: it cannot be read, or is invalid.
        """
        return read_generation_config(gen_config_arg)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """As :meth:`Trainer.evaluate`; with ``predict_with_generate`` metrics are computed from generated tokens.

        Args:
            eval_dataset: a dataset, a dict of them, or the name of one; default: the Trainer's.
            ignore_keys: keys of the model's output that are not predictions.
            metric_key_prefix: prefix of the metric names.
            gen_kwargs: keywords of the model's ``generate``: ``max_length``, ``num_beams`` ...; for every dataset.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                chosen = name if eval_dataset is None else part
                metrics.update(self.evaluate(chosen, ignore_keys, f"{metric_key_prefix}_{name}", **gen_kwargs))
            return metrics
        with self._ds_trainer.generating_with(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """As :meth:`Trainer.predict`; with ``predict_with_generate`` predictions are generated tokens.

        Predictions and labels are padded with the padding token; if lengths still differ, with -100.

        Args:
            test_dataset: a dataset, with or without labels.
            ignore_keys: keys of the model's output that are not predictions.
            metric_key_prefix: prefix of the metric names.
            gen_kwargs: keywords of the model's ``generate``: ``max_length``, ``num_beams`` ...
        """
        with self._ds_trainer.generating_with(gen_kwargs):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    @fails_together
    def evaluation_loop(self, *args: Any, **keywords: Any) -> EvalLoopOutput:
        """As :meth:`Trainer.evaluation_loop`. Weights gathered for generation stay gathered until it ends."""
        with self._ds_trainer.evaluating():
            return super().evaluation_loop(*args, **keywords)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """One batch of an evaluation; with ``predict_with_generate`` its tokens are generated.

        Args:
            model: the model, or the engine that wraps it.
            inputs: the batch, not sharded: every rank of a replica generates all of it.
            prediction_loss_only: return only the loss.
            ignore_keys: keys of the model's output that are not predictions.
            gen_kwargs: keywords of ``generate``; default: those of :meth:`evaluate` or :meth:`predict`.

        Returns:
            The mean loss as in :meth:`Trainer.prediction_step` (None without labels), generated tokens
            ``[samples, length]``, and labels.
        """
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        assembly = self._ds_trainer
        with assembly.weights_at_hand(), torch.no_grad():
            tokens = assembly.generate(inputs, gen_kwargs)
            labels = detached(on_device(labels_of(inputs, self.label_names), assembly.device))
            loss = None
            if labels is not None:
                loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        if self.args.prediction_loss_only:
            return loss, None, None
        if isinstance(labels, torch.Tensor) and labels.dim() == 2:
            labels = padded(labels, self.model, self.processing_class)
        return loss, padded(tokens, self.model, self.processing_class), labels


# Generated tokens and labels have the length and the token of transformers' Seq2SeqTrainer, so that most batches have
# equal shapes. Longer rows stay; if batches or ranks still differ, rows are padded with -100 when they are concatenated
# (training/evaluation/nested.py).


def padded(tokens: torch.Tensor, model: nn.Module, processing_class: Any) -> torch.Tensor:
    """``tokens`` ``[samples, length]``, padded to the length in the model's generation configuration.

    That length is ``generation_config.max_length`` (20 if it is not set); for longer rows ``max_new_tokens`` plus one.

    Raises:
        ConfigError: padding is needed, and there is no padding token.
    """
    config: Any = model.generation_config
    length = _DEFAULT_LENGTH if config.max_length is None else config.max_length
    if tokens.shape[-1] >= length and config.max_new_tokens is not None:
        length = config.max_new_tokens + 1
    missing = length - tokens.shape[-1]
    if missing <= 0:
        return tokens
    return F.pad(tokens, (0, missing), value=padding_token(model, processing_class))


def padding_token(model: nn.Module, processing_class: Any) -> int:
    """The padding token of the tokenizer (or its end token), or else of the model.

    Raises:
        ConfigError: neither has one.
    """
    owners = [(processing_class, "pad_token_id"), (processing_class, "eos_token_id")]
    if not hasattr(processing_class, "pad_token_id"):
        owners = []
    configs = [getattr(model, name, None) for name in ("config", "generation_config")]
    for owner, name in [*owners, *((config, "pad_token_id") for config in configs)]:
        token = getattr(owner, name, None)
        if token is not None:
            return int(token)
    raise ConfigError(
        f"predict_with_generate=True pads generated sequences, but neither the processing_class nor the configuration "
        f"of {type(model).__name__} has a pad_token_id. Set model.config.pad_token_id."
    )
