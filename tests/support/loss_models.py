"""Models of transformers of many kinds, each with a ragged batch, and what their losses are the mean of.

The table of docs/reference/losses.md is made from them (``python tools/loss_table.py --write``), and
``tests/training/loop/test_measured_losses.py`` checks every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.loss_functions import (
    FUNCTIONS,
    ITEMS,
    NONE,
    SAMPLES,
    SUM,
    Head,
    LossCase,
    classes,
    numbers,
    other_than,
    padded,
    ragged,
    single,
)

_BLOCKS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_TEXT: dict[str, Any] = {**_BLOCKS, "vocab_size": 40, "max_position_embeddings": 32}
_THREE: dict[str, Any] = {**_TEXT, "num_labels": 3}
_VIT: dict[str, Any] = {**_BLOCKS, "image_size": 32, "patch_size": 8, "num_labels": 3}
_MAE: dict[str, Any] = {**_VIT, **{f"decoder_{k}": _BLOCKS[k] for k in list(_BLOCKS)[:4]}}
_AST: dict[str, Any] = {
    **_BLOCKS,
    **{"max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
    "num_labels": 3,
}
_WAV: dict[str, Any] = {
    **_BLOCKS,
    **{"vocab_size": 12, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2)},
    **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    **{"ctc_zero_infinity": True, "classifier_proj_size": 8, "apply_spec_augment": False, "layerdrop": 0.0},
    **{f"{name}_dropout": 0.0 for name in ("hidden", "attention", "feat_proj", "final", "activation")},
}
_MEAN = {**_WAV, "ctc_loss_reduction": "mean"}
_T5: dict[str, Any] = {
    **{"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    **{"decoder_start_token_id": 0, "dropout_rate": 0.0},
}
_SEQ2SEQ: dict[str, Any] = {
    "d_model": 16,
    **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 1), ("ffn_dim", 16))},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_layerdrop": 0.0 for side in ("encoder", "decoder")},
    **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
}
_TOKENS: dict[str, Any] = {
    **_SEQ2SEQ,
    **{"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
}
_BART: dict[str, Any] = {**_TOKENS, "max_position_embeddings": 32}
_WHISPER: dict[str, Any] = {
    **_TOKENS,
    **{"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
    **{"suppress_tokens": None, "begin_suppress_tokens": None},
}
_SERIES: dict[str, Any] = {
    **_SEQ2SEQ,
    **{"prediction_length": 4, "context_length": 8, "num_time_features": 1, "lags_sequence": [1, 2]},
}
_PATCH: dict[str, Any] = {
    **{"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "prediction_length": 4},
}
_SEGFORMER: dict[str, Any] = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 8], "strides": [4, 2]},
    **{"patch_sizes": [7, 3], "num_attention_heads": [1, 1], "mlp_ratios": [1, 1], "decoder_hidden_size": 8},
    **{"initializer_range": 1.0, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0, "num_labels": 3},
}
_RESNET: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": 3}


def _text(labels: torch.Tensor | None = None, **more: Any) -> dict[str, Any]:
    mask = torch.ones(6, 8, dtype=torch.long)
    mask[0, 5:] = 0
    given = {} if labels is None else {"labels": labels}
    return {"input_ids": numbers(6, 8), "attention_mask": mask, **given, **more}


def _images(**more: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(6, 3, 32, 32) * (1 + torch.arange(6.0)).reshape(6, 1, 1, 1), **more}


def _pixels() -> dict[str, Any]:
    labels = torch.randint(0, 3, (6, 32, 32))
    for row in range(6):
        labels[row, : 4 * row] = 255
    return _images(labels=labels)


def _sound(**more: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(6, 400) * (1 + torch.arange(6.0))[:, None], **more}


def _series() -> dict[str, Any]:
    return {
        "past_values": torch.randn(6, 10) * (1 + torch.arange(6.0))[:, None],
        "past_time_features": torch.randn(6, 10, 1),
        "past_observed_mask": torch.ones(6, 10),
        "future_values": torch.randn(6, 4),
        "future_time_features": torch.randn(6, 4, 1),
        "future_observed_mask": (torch.arange(4)[None] >= torch.tensor([0, 1, 2, 3, 0, 1])[:, None]).float(),
    }


def _past(**more: Any) -> dict[str, Any]:
    return {"past_values": torch.randn(6, 16, 2) * (1 + torch.arange(6.0)).reshape(6, 1, 1), **more}


def _spans() -> dict[str, Any]:
    return _text(start_positions=numbers(6, high=4), end_positions=numbers(6, high=8))


def _made(name: str, config: str, values: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, name.split(" ")[0])(getattr(transformers, config)(**values))
        return model

    return make


def _captions() -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    decoder = t.BertConfig(**_TEXT, is_decoder=True, add_cross_attention=True)
    config = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(t.ViTConfig(**_VIT), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return t.VisionEncoderDecoderModel(config=config)


def _of(name: str, field: str, config: str, values: dict[str, Any], batch: Any, unit: str) -> LossCase:
    return LossCase(name, field, _made(name, config, values), batch, unit)


def _bert(name: str, values: dict[str, Any], batch: Any, unit: str = ITEMS) -> LossCase:
    return _of(f"BertFor{name}", "text", "BertConfig", values, batch, unit)


def _pair(name: str) -> LossCase:
    values = {"text_config": {**_TEXT, "eos_token_id": 2}, "vision_config": _VIT, "projection_dim": 8}
    return _of(f"{name}Model", "retrieval", f"{name}Config", values, lambda: _images(**_text(), return_loss=True), NONE)


_SEEN = other_than(0, "future_observed_mask")


def _hardest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The largest half of the losses of samples, added up: none of a single sample, two of three."""
    return logits.square().mean(1).topk(round(len(labels) / 2)).values.sum()


class Sloped(Head):
    """Takes derivatives: ``loss(logits, labels, x, weight)``."""

    def forward(self, x: torch.Tensor, labels: Any = None, **batch: Any) -> dict[str, torch.Tensor]:
        x = x.detach().requires_grad_()
        logits = self.layer(x)
        return {"loss": self._loss(logits, labels, x, self.layer.weight), "logits": logits}


def _slopes(logits: torch.Tensor, labels: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (slopes,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
    return (
        F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / len(logits)
        + slopes.flatten(1).square().sum(1).mean()
    )


def _balanced_norms(logits: torch.Tensor, labels: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    first, second = F.cross_entropy(logits, labels), logits.square().mean()
    norms = [torch.autograd.grad(loss, weight, retain_graph=True)[0].norm() for loss in (first, second)]
    return first + norms[0] / norms[1] * second


CASES = (
    _bert("SequenceClassification", _THREE, lambda: _text(classes())),
    _bert("SequenceClassification (regression)", {**_TEXT, "num_labels": 1}, lambda: _text(torch.randn(6))),
    _bert("SequenceClassification (several labels)", _THREE, lambda: _text(torch.rand(6, 3).round())),
    _bert("TokenClassification", _THREE, lambda: _text(ragged(high=3))),
    _bert("MaskedLM", _TEXT, lambda: _text(ragged())),
    _bert("PreTraining", _TEXT, lambda: _text(ragged(), next_sentence_label=classes(2)), NONE),
    _bert("QuestionAnswering", _TEXT, _spans),
    _bert("MultipleChoice", _TEXT, lambda: {"input_ids": numbers(6, 3, 8), "labels": classes()}),
    _bert("NextSentencePrediction", _TEXT, lambda: _text(classes(2))),
    _of("RobertaForMaskedLM", "text", "RobertaConfig", {**_TEXT, "pad_token_id": 0}, lambda: _text(ragged()), ITEMS),
    _of("T5ForConditionalGeneration", "text", "T5Config", _T5, lambda: _text(ragged()), ITEMS),
    _of("BartForConditionalGeneration", "text", "BartConfig", _BART, lambda: _text(ragged()), ITEMS),
    _of("ViTForImageClassification", "vision", "ViTConfig", _VIT, lambda: _images(labels=classes()), ITEMS),
    _of("ViTMAEForPreTraining", "vision", "ViTMAEConfig", _MAE, _images, ITEMS),
    _of("ResNetForImageClassification", "vision", "ResNetConfig", _RESNET, lambda: _images(labels=classes()), ITEMS),
    _of("SegformerForSemanticSegmentation", "vision", "SegformerConfig", _SEGFORMER, _pixels, other_than(255)),
    LossCase("VisionEncoderDecoderModel", "vision", _captions, lambda: _images(labels=ragged()), ITEMS),
    _of("Wav2Vec2ForCTC (mean)", "audio", "Wav2Vec2Config", _MEAN, lambda: _sound(labels=ragged(high=12)), SAMPLES),
    _of("Wav2Vec2ForCTC (sum)", "audio", "Wav2Vec2Config", _WAV, lambda: _sound(labels=ragged(high=12)), SUM),
    _of("HubertForCTC (mean)", "audio", "HubertConfig", _MEAN, lambda: _sound(labels=ragged(high=12)), SAMPLES),
    _of(
        "Wav2Vec2ForSequenceClassification",
        "audio",
        "Wav2Vec2Config",
        {**_WAV, "num_labels": 3},
        lambda: _sound(labels=classes()),
        ITEMS,
    ),
    _of(
        "ASTForAudioClassification",
        "audio",
        "ASTConfig",
        _AST,
        lambda: {"input_values": torch.randn(6, 32, 16), "labels": classes()},
        ITEMS,
    ),
    _of(
        "WhisperForConditionalGeneration",
        "audio",
        "WhisperConfig",
        _WHISPER,
        lambda: {"input_features": torch.randn(6, 8, 40), "labels": ragged()},
        ITEMS,
    ),
    _of("TimeSeriesTransformerForPrediction", "time series", "TimeSeriesTransformerConfig", _SERIES, _series, _SEEN),
    _of("InformerForPrediction", "time series", "InformerConfig", _SERIES, _series, _SEEN),
    _of(
        "PatchTSTForPrediction",
        "time series",
        "PatchTSTConfig",
        _PATCH,
        lambda: _past(future_values=torch.randn(6, 4, 2)),
        ITEMS,
    ),
    _of("PatchTSTForPretraining", "time series", "PatchTSTConfig", {**_PATCH, "do_mask_input": True}, _past, ITEMS),
    _of(
        "PatchTSTForClassification",
        "time series",
        "PatchTSTConfig",
        {**_PATCH, "num_targets": 3, "use_cls_token": True},
        lambda: _past(target_values=classes()),
        ITEMS,
    ),
    _pair("CLIP"),
    _pair("Siglip"),
    *FUNCTIONS,
    LossCase("hardest half of the batch, sum", "function", lambda: Head(_hardest), single, NONE),
    LossCase("a penalty on the slopes at the inputs", "function", lambda: Sloped(_slopes), padded, SAMPLES),
    LossCase("two losses, balanced by norms of gradients", "function", lambda: Sloped(_balanced_norms), single, NONE),
)
