"""Loss functions of many kinds, each with a ragged batch, and what their losses are the mean of (``loss_models``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ITEMS, SAMPLES, SUM, NONE = "items", "samples", "sum", "not additive"


@dataclass(frozen=True)
class LossCase:
    """A model or loss function, and its weight.

    Attributes:
        name: the class, or what the function computes.
        field: text, vision, audio, time series, retrieval, function.
        model: makes the model.
        batch: makes six samples.
        unit: what the loss is the mean of: :data:`ITEMS`, :data:`SAMPLES`, the text of a unit, :data:`SUM` or
            :data:`NONE`.
    """

    name: str
    field: str
    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    unit: str


def other_than(ignored: int, key: str = "labels", first: str = "") -> str:
    """The text of a unit."""
    return f"entries of {key!r}{first} other than {ignored}"


def numbers(*shape: int, high: int = 40, low: int = 1) -> torch.Tensor:
    """Random token ids or classes."""
    return torch.randint(low, high, shape)


def ragged(rows: int = 6, length: int = 8, ignored: int = -100, high: int = 40) -> torch.Tensor:
    """Labels ``[rows, length]`` of which each row has another number."""
    labels = numbers(rows, length, high=high)
    for row in range(rows):
        labels[row, 1 + row :] = ignored
    return labels


def classes(count: int = 3) -> torch.Tensor:
    """A class for each of six samples."""
    return torch.tensor([0, 1, 2, 1, 0, 1]) % count


class Head(nn.Module):
    """A linear layer; ``loss(logits, labels, ...)`` is the loss."""

    accepts_loss_kwargs = False

    def __init__(self, loss: Callable[..., torch.Tensor], outputs: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, outputs)
        self._loss = loss

    def forward(self, x: torch.Tensor, labels: Any = None, **batch: Any) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": self._loss(logits, labels, **batch), "logits": logits}


def _x(*more: int) -> torch.Tensor:
    return torch.randn(6, *more, 4) * (1 + torch.arange(6.0)).reshape(6, *[1] * len(more), 1)


def ctc(reduction: str) -> Callable[..., torch.Tensor]:
    """A CTC loss of padded labels."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        steps, used = logits.log_softmax(-1).transpose(0, 1), labels >= 0
        lengths = torch.full((len(labels),), logits.shape[1])
        targets = labels.masked_select(used)
        return F.ctc_loss(steps, targets, lengths, used.sum(-1), reduction=reduction, zero_infinity=True)

    return loss


def _ctc_with_lengths(logits: torch.Tensor, labels: torch.Tensor, label_lengths: torch.Tensor) -> torch.Tensor:
    steps, lengths = logits.log_softmax(-1).transpose(0, 1), torch.full((len(logits),), logits.shape[1])
    total = F.ctc_loss(steps, labels, lengths, label_lengths, reduction="sum", zero_infinity=True)
    return total / label_lengths.sum()


def _ctc_over_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ctc("sum")(logits, labels) / (labels >= 0).sum()


def _tokens(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels, **options)


def _tokens_over_samples(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _tokens(reduction="sum")(logits, labels) / len(logits)


def _shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _mean_of_means(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses.sum(1) / (labels != -100).sum(1)).mean()


def _focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).sum()


def _weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 5.0, 0.2, 1.0, 1.0]))


def _two_heads(logits: torch.Tensor, labels: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return _tokens()(logits, labels) + F.cross_entropy(logits[:, 0], label)


def _masked_error(logits: torch.Tensor, labels: torch.Tensor, observed_mask: torch.Tensor) -> torch.Tensor:
    return ((logits - labels).square() * observed_mask).sum() / observed_mask.sum()


def _known_error(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits - labels)[~labels.isnan()].square().mean()


def _by_weights(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses * weights).sum() / weights.sum()


def _own_tokens(logits: torch.Tensor, labels: Any, input_ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten(), ignore_index=0)


def _classwise(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found = F.normalize(logits)
    same = labels[:, None] == labels[None]
    return -(F.log_softmax(found @ found.T / 0.1, 1) * same).sum() / same.sum()


def _several(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=torch.full((5,), 3.0))


def _divergence(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.kl_div(logits.log_softmax(-1), labels, reduction="batchmean")


def _dice(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found = logits.sigmoid()
    return 1 - 2 * (found * labels).sum() / (found.sum() + labels.sum())


def _in_batch(logits: torch.Tensor, labels: Any = None) -> torch.Tensor:
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def _triplet(logits: torch.Tensor, labels: Any, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    return F.triplet_margin_loss(logits, positive, negative)


def _triplets() -> dict[str, torch.Tensor]:
    return {"x": _x(), "positive": torch.randn(6, 5), "negative": torch.randn(6, 5)}


def _cosine(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(F.cosine_similarity(logits[:, 0], logits[:, 1]), labels)


def _focal_over_positives(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).sum() / labels.sum()


def _hard_triplets(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    distances, same = torch.cdist(logits, logits), labels[:, None] == labels
    return F.relu((distances * same).amax(1) - (distances + 1e3 * same).amin(1) + 9).mean()


def _arc(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        8 * (F.normalize(logits).clamp(-0.99, 0.99).acos() + 0.3 * F.one_hot(labels, 5)).cos(), labels
    )


def _dice_of_samples(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (1 - 2 * (logits.sigmoid() * labels).sum(1) / (logits.sigmoid().sum(1) + labels.sum(1) + 1)).mean()


def _union(logits: torch.Tensor, labels: Any, boxes: torch.Tensor, box_mask: torch.Tensor) -> torch.Tensor:
    found = logits[..., :2].sigmoid()
    shared = torch.minimum(found, boxes).prod(-1)
    return (1 - shared / (found.prod(-1) + boxes.prod(-1) - shared))[box_mask].mean()


def _known_boxes(logits: torch.Tensor, labels: Any, boxes: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(logits[..., :2][boxes[..., 0] >= 0], boxes[boxes[..., 0] >= 0])


def _ordinal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, (labels[:, None] > torch.arange(5)).float())


def _frames(logits: torch.Tensor, labels: torch.Tensor, n_frames: torch.Tensor) -> torch.Tensor:
    used = torch.arange(8) < n_frames[:, None]
    return F.huber_loss(logits[..., 0][used], labels[used])


def _two_views(logits: torch.Tensor, labels: Any = None) -> torch.Tensor:
    views = F.normalize(torch.cat([logits, logits + logits.flip(1)]))
    count = len(logits)
    scores = (views @ views.T).masked_fill(torch.eye(2 * count).bool(), -1e9)
    return F.cross_entropy(scores, (torch.arange(2 * count) + count) % (2 * count))


def _sum_and_more(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _tokens(reduction="sum")(logits, labels) + 0.7


def _exits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _tokens()(logits, labels) + 0.3 * _tokens()(logits / 2, labels)


def _uncertainty(logits: torch.Tensor, labels: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return 0.8 * _tokens()(logits, labels) + 0.2 + 1.4 * F.cross_entropy(logits[:, 0], label) - 0.3


def _balanced(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chances = logits.softmax(-1).flatten(0, 1)
    chosen = F.one_hot(chances.argmax(-1), 5).float().mean(0)
    return _tokens()(logits, labels) + 0.05 * (chosen * chances.mean(0)).sum()


def _masked_at_random(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    masked = torch.bernoulli(torch.full(logits.shape[:2], 0.5)).bool()
    return F.mse_loss(logits[masked], labels[masked])


def _mixed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, labels[torch.randperm(len(labels))])


def _hardest_half(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="none").topk((len(labels) + 1) // 2).values.mean()


def _boxes_in_rows() -> dict[str, torch.Tensor]:
    return {"x": _x(4), "boxes": torch.rand(6, 4, 2), "box_mask": _positives()[:, :4].bool()}


def _padded_boxes() -> dict[str, torch.Tensor]:
    return {"x": _x(4), "boxes": torch.rand(6, 4, 2).masked_fill(_positives()[:, :4, None] == 0, -1.0)}


def _of_boxes(logits: torch.Tensor, labels: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    rows = zip(logits, labels, strict=True)
    total = torch.stack([(row[:4] - label["boxes"]).abs().sum() for row, label in rows]).sum()
    return total / sum(len(label["boxes"]) for label in labels)


def _boxes() -> dict[str, Any]:
    return {"x": _x(), "labels": [{"boxes": torch.rand(count, 4)} for count in (1, 2, 4, 3, 1, 5)]}


def _long() -> dict[str, torch.Tensor]:
    return {"x": _x(30), "labels": ragged(high=5)}


def _with_lengths() -> dict[str, torch.Tensor]:
    return {"x": _x(30), "labels": ragged(ignored=0, high=5), "label_lengths": torch.arange(1, 7)}


def padded(ignored: int = -100) -> dict[str, torch.Tensor]:
    return {"x": _x(8), "labels": ragged(ignored=ignored, high=5)}


def single() -> dict[str, torch.Tensor]:
    """A class for each sample."""
    return {"x": _x(), "labels": classes()}


def _positives() -> torch.Tensor:
    return (torch.arange(5)[None] <= torch.tensor([0, 3, 1, 2, 0, 4])[:, None]).long()


def _values() -> dict[str, torch.Tensor]:
    return {"x": _x(), "labels": torch.randn(6, 5)}


def _partly_known() -> dict[str, torch.Tensor]:
    known = torch.arange(5)[None] <= torch.arange(6)[:, None]
    return {"x": _x(), "labels": torch.where(known, torch.randn(6, 5), torch.nan)}


def _token_weights() -> dict[str, torch.Tensor]:
    return {"x": _x(8), "labels": numbers(6, 8, high=5), "weights": torch.rand(6, 8)}


def _frames_of_values() -> dict[str, torch.Tensor]:
    return {"x": _x(8), "labels": torch.randn(6, 8, 5)}


def _observed() -> dict[str, torch.Tensor]:
    mask = torch.arange(8)[None, :, None] <= torch.arange(6)[:, None, None]
    return {**_frames_of_values(), "observed_mask": mask.expand(6, 8, 5).float()}


def _of(name: str, loss: Any, batch: Any, unit: str, field: str = "function") -> LossCase:
    return LossCase(name, field, lambda: Head(loss), batch, unit)


FUNCTIONS = (
    _of("in-batch negatives", _in_batch, lambda: {"x": _x()}, NONE, "retrieval"),
    _of("supervised contrastive", _classwise, single, NONE, "retrieval"),
    _of("triplets", _triplet, _triplets, ITEMS, "retrieval"),
    _of("cosine similarity of pairs", _cosine, lambda: {"x": _x(2), "labels": torch.rand(6)}, ITEMS, "retrieval"),
    _of("boxes: sum over boxes / boxes of the batch", _of_boxes, _boxes, other_than(0), "vision"),
    _of("pixel cross-entropy, 255 ignored", _tokens(ignore_index=255), lambda: padded(255), other_than(255), "vision"),
    _of("Dice", _dice, lambda: {"x": _x(), "labels": torch.rand(6, 5).round()}, NONE, "vision"),
    _of("CTC, mean", ctc("mean"), _long, SAMPLES, "audio"),
    _of("CTC, sum", ctc("sum"), _long, SUM, "audio"),
    _of("CTC, sum over label lengths", _ctc_over_labels, _long, ITEMS, "audio"),
    _of("CTC, labels padded with 0, with lengths", _ctc_with_lengths, _with_lengths, other_than(0), "audio"),
    _of("token cross-entropy", _tokens(), padded, ITEMS),
    _of("token cross-entropy, sum", _tokens(reduction="sum"), padded, SUM),
    _of("token cross-entropy, 0 ignored", _tokens(ignore_index=0), lambda: padded(0), other_than(0)),
    _of(
        "token cross-entropy, labels shifted", _shifted, padded, other_than(-100, first=" after the first of each row")
    ),
    _of("tokens weighted in the batch", _by_weights, _token_weights, "entries, weighted or counted by 'weights',"),
    _of(
        "tokens that are their own labels, 0 ignored",
        _own_tokens,
        lambda: {"x": _x(8), "input_ids": ragged(ignored=0, high=5).flip(0)},
        other_than(0, "input_ids", " after the first of each row"),
    ),
    _of("mean over samples of means over tokens", _mean_of_means, padded, SAMPLES),
    _of("token cross-entropy, sum / batch size", _tokens_over_samples, padded, SAMPLES),
    _of(
        "samples by importance",
        lambda z, labels, importance: _by_weights(z[:, None], labels[:, None], importance[:, None]),
        lambda: {**single(), "importance": torch.rand(6)},
        "entries, weighted or counted by 'importance',",
    ),
    _of("cross-entropy with class weights", _weighted, single, NONE),
    _of("cross-entropy with label smoothing", nn.CrossEntropyLoss(label_smoothing=0.1), single, ITEMS),
    _of("several labels with weights", _several, lambda: {"x": _x(), "labels": torch.rand(6, 5).round()}, ITEMS),
    _of("Kullback-Leibler divergence, batchmean", _divergence, lambda: {"x": _x(), "labels": torch.rand(6, 5)}, ITEMS),
    _of("focal loss, sum", _focal, single, SUM),
    _of("tokens and samples, two heads", _two_heads, lambda: {**padded(), "label": classes()}, NONE),
    _of("masked mean squared error", _masked_error, _observed, other_than(0, "observed_mask"), "time series"),
    _of("mean squared error, NaN ignored", _known_error, _partly_known, other_than(-100), "time series"),
    _of("root of the mean squared error", lambda z, labels: F.mse_loss(z, labels).sqrt(), _values, NONE),
    _of("mean squared error + variance in the batch", lambda z, y: F.mse_loss(z, y) + z.var(0).mean(), _values, NONE),
    _of("noise drawn in the model", lambda z, labels: F.mse_loss(z + torch.randn_like(z), labels), _values, ITEMS),
    _of(
        "focal loss / number of positives",
        _focal_over_positives,
        lambda: {"x": _x(), "labels": _positives()},
        other_than(0),
    ),
    _of("hardest triplets of the batch", _hard_triplets, single, NONE, "retrieval"),
    _of("ArcFace", _arc, single, ITEMS, "retrieval"),
    _of("NT-Xent of two views", _two_views, lambda: {"x": _x()}, NONE, "retrieval"),
    _of("Dice of each sample", _dice_of_samples, lambda: {"x": _x(), "labels": _positives().float()}, ITEMS, "vision"),
    _of("intersection over union, boxes with a mask", _union, _boxes_in_rows, other_than(0, "box_mask"), "vision"),
    _of("boxes padded with -1", _known_boxes, _padded_boxes, other_than(-1, "boxes"), "vision"),
    _of("mixed labels", F.cross_entropy, lambda: {"x": _x(), "labels": torch.rand(6, 5).softmax(-1)}, ITEMS, "vision"),
    _of("mixup drawn in the loss", _mixed, single, NONE, "vision"),
    _of("masked reconstruction, mask drawn in the model", _masked_at_random, _frames_of_values, NONE, "vision"),
    _of("ordinal classes", _ordinal, single, ITEMS),
    _of(
        "Huber loss over a number of frames",
        _frames,
        lambda: {"x": _x(8), "labels": torch.randn(6, 8), "n_frames": torch.tensor([8, 2, 5, 1, 3, 7])},
        "entries, weighted or counted by 'n_frames',",
        "time series",
    ),
    _of("several exits", _exits, padded, ITEMS),
    _of("tokens and samples with uncertainty weights", _uncertainty, lambda: {**padded(), "label": classes()}, NONE),
    _of("token cross-entropy + a penalty on weights", lambda z, labels: _tokens()(z, labels) + 0.7, padded, ITEMS),
    _of("token cross-entropy, sum + a penalty on weights", _sum_and_more, padded, NONE),
    _of("token cross-entropy + load balance", _balanced, padded, NONE),
    _of("hardest half of the batch", _hardest_half, single, NONE),
)
