"""Cross-entropy of a linear head in tiles: the numbers of plain PyTorch, in a tenth of the memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.live_tensors import LiveTensors
from ds_trainer.parallel import linear_cross_entropy as module
from ds_trainer.parallel.linear_cross_entropy import TileSettings, linear_cross_entropy
from ds_trainer.parallel.one_pass_cross_entropy import one_pass_cross_entropy

TOKENS, WIDTH, CLASSES = 37, 16, 101
ODD = TileSettings(chunk_tokens=7, vocabulary_chunk=13)


def capped(logits: torch.Tensor, rows: slice | None = None) -> torch.Tensor:
    return torch.tanh(logits / 3) * 3


def case(dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states, weight and bias, and targets of which some are ignored."""
    torch.manual_seed(seed)
    shapes = ((TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    targets = torch.randint(0, CLASSES, (TOKENS,))
    targets[::5] = -100
    return [(scale * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes], targets


def plain(leaves: list[torch.Tensor], targets: torch.Tensor, settings: TileSettings) -> torch.Tensor:
    logits = F.linear(*leaves)
    logits = capped(logits) if settings.functions else logits
    losses = F.cross_entropy(logits.float(), targets, reduction="none", label_smoothing=settings.label_smoothing)
    if logits.dtype == torch.float64:
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=settings.label_smoothing)
    squares = logits.logsumexp(-1).square()
    return losses + settings.z_loss * torch.where(targets != -100, squares, 0)


def in_tiles(leaves: list[torch.Tensor], targets: torch.Tensor, settings: TileSettings) -> torch.Tensor:
    hidden, weight, bias = leaves
    return linear_cross_entropy([(hidden, weight)], bias, targets, settings)


def numbers(loss: Callable[..., torch.Tensor], dtype: torch.dtype, settings: TileSettings) -> list[torch.Tensor]:
    """Losses of the tokens, and gradients of a weighted sum of them."""
    leaves, targets = case(dtype)
    losses = loss(leaves, targets, settings)
    weights = torch.linspace(-1, 2, TOKENS, dtype=losses.dtype)
    return [losses.detach(), *torch.autograd.grad((losses * weights).sum(), leaves)]


def differences(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, wanted, strict=True)]


SETTINGS = [
    replace(ODD, label_smoothing=smoothing, z_loss=factor, functions=functions)
    for smoothing, factor, functions in itertools.product((0.0, 0.1), (0.0, 1e-2), ((), (capped,)))
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_losses_and_gradients_are_those_of_whole_logits(settings: TileSettings) -> None:
    for dtype, allowed in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        assert max(differences(numbers(in_tiles, dtype, settings), numbers(plain, dtype, settings))) < allowed


@pytest.mark.parametrize("chunks", [(1, 1), (TOKENS, CLASSES), (TOKENS - 1, CLASSES - 1), (5, 200), (100, 3)])
def test_any_size_of_tiles_gives_the_same(chunks: tuple[int, int]) -> None:
    settings = TileSettings(chunk_tokens=chunks[0], vocabulary_chunk=chunks[1])
    found, wanted = numbers(in_tiles, torch.float32, settings), numbers(plain, torch.float32, settings)
    assert max(differences(found, wanted)) < 1e-6


def test_a_border_that_drops_a_token_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropping(total: int, size: int) -> Any:
        return (slice(start, min(start + size, total) - (total == TOKENS)) for start in range(0, total, size))

    monkeypatch.setattr(module, "_parts", dropping)
    found, wanted = numbers(in_tiles, torch.float32, ODD), numbers(plain, torch.float32, ODD)
    assert min(differences(found, wanted)) > 1e-2


def test_in_bf16_it_is_nearer_to_the_truth_than_the_plain_loss() -> None:
    leaves, targets = case(torch.bfloat16)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    results = {}
    for name, loss, inputs in (("truth", plain, exact), ("plain", plain, leaves), ("tiles", in_tiles, leaves)):
        total = loss(inputs, targets, ODD).sum()
        results[name] = [total.detach(), *torch.autograd.grad(total, inputs)]
    of_plain, of_tiles = (differences(results[name], results["truth"]) for name in ("plain", "tiles"))
    assert all(tiles < usual for tiles, usual in zip(of_tiles, of_plain, strict=True)), (of_tiles, of_plain)


def test_a_head_of_two_terms_has_their_sum_as_logits() -> None:
    """LoRA: the second term has the inner dimension."""
    (hidden, weight, bias), targets = case(torch.float32)
    down, up = torch.randn(3, WIDTH, requires_grad=True), torch.randn(CLASSES, 3, requires_grad=True)
    leaves = [hidden, weight, bias, down, up]
    found = linear_cross_entropy([(hidden, weight), (hidden @ down.t(), up)], bias, targets, ODD).sum()
    logits = F.linear(hidden, weight, bias) + hidden @ down.t() @ up.t()
    wanted = F.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(found, wanted)
    both = zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True)
    assert all(float((a - b).norm() / b.norm()) < 1e-6 for a, b in both)


def test_frozen_weights_get_no_gradient() -> None:
    (hidden, weight, bias), targets = case(torch.float32)
    frozen = weight.detach()
    loss = linear_cross_entropy([(hidden, frozen)], bias.detach(), targets, ODD).sum()
    (found,) = torch.autograd.grad(loss, [hidden])
    (wanted,) = torch.autograd.grad(plain([hidden, weight, bias], targets, ODD).sum(), [hidden])
    torch.testing.assert_close(found, wanted)


def test_logits_of_minus_infinity_and_targets_that_are_no_class() -> None:
    leaves, targets = case(torch.float32)

    def masked(logits: torch.Tensor, rows: slice) -> torch.Tensor:
        classes = torch.arange(rows.start, rows.stop)
        return logits.masked_fill(classes >= 50, float("-inf"))

    targets = torch.where(targets >= 50, 3, targets)
    found = in_tiles(leaves, targets, replace(ODD, functions=(masked,)))
    wanted = F.cross_entropy(masked(F.linear(*leaves), slice(0, CLASSES)), targets, reduction="none")
    torch.testing.assert_close(found, wanted)
    targets[3] = CLASSES
    with pytest.raises(RuntimeError, match="no class"):
        in_tiles(leaves, targets, ODD)


def peak(loss: Callable[..., torch.Tensor], tokens: int, classes: int, width: int, dtype: torch.dtype) -> int:
    """Bytes at most allocated by the passes of a loss, beside the gradients that both return."""
    hidden = torch.zeros(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.zeros(classes, width, dtype=dtype, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long)
    with LiveTensors() as live:
        for one in (hidden, weight, targets):
            one.detach()  # seen now, so that they count as what exists before
        before = live.now
        loss([hidden, weight, None], targets, TileSettings()).sum().backward()
    return live.peak - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_less_than_a_tenth(dtype: torch.dtype) -> None:
    """Here with an eighth of 128K classes and of 4,096 tokens (benchmarks/loss_memory.py measures these)."""

    def usual(leaves: list[Any], targets: torch.Tensor, settings: TileSettings) -> torch.Tensor:
        return F.cross_entropy(F.linear(*leaves).float(), targets, reduction="none")

    def tiles(leaves: list[Any], targets: torch.Tensor, settings: TileSettings) -> torch.Tensor:
        return in_tiles(leaves, targets, replace(settings, chunk_tokens=128, vocabulary_chunk=1024))

    assert 10 * peak(tiles, 512, 16384, 32, dtype) < peak(usual, 512, 16384, 32, dtype)


# -- one pass -----------------------------------------------------------------


def summed(leaves: list[torch.Tensor], targets: torch.Tensor, settings: TileSettings) -> torch.Tensor:
    hidden, weight, bias = leaves
    return one_pass_cross_entropy([(hidden, weight)], bias, targets, settings)[0]


def numbers_of_sum(loss: Callable[..., torch.Tensor], dtype: torch.dtype, settings: TileSettings) -> list[torch.Tensor]:
    """A sum of losses and its gradients, as a step scales them."""
    leaves, targets = case(dtype)
    total = loss(leaves, targets, settings).sum() * 0.37
    return [total.detach(), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_pass_gives_the_gradients_of_a_sum(settings: TileSettings) -> None:
    for chunk, (dtype, allowed) in itertools.product(
        (1, 7, TOKENS - 1, TOKENS), ((torch.float32, 1e-6), (torch.float64, 1e-14))
    ):
        chosen = replace(settings, chunk_tokens=chunk)
        found, wanted = numbers_of_sum(summed, dtype, chosen), numbers_of_sum(plain, dtype, chosen)
        assert max(differences(found, wanted)) < allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_one_pass_is_nearer_to_the_truth_than_the_plain_loss(dtype: torch.dtype) -> None:
    leaves, targets = case(dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    results = {}
    for name, loss, inputs in (("truth", plain, exact), ("plain", plain, leaves), ("one", summed, leaves)):
        total = loss(inputs, targets, ODD).sum()
        results[name] = [total.detach(), *torch.autograd.grad(total, inputs)]
    of_plain, of_one = (differences(results[name], results["truth"]) for name in ("plain", "one"))
    assert all(one < usual for one, usual in zip(of_one, of_plain, strict=True)), (of_one, of_plain)


def test_one_pass_has_three_products_where_tiles_have_four() -> None:
    (hidden, weight, _), targets = case(torch.float32)

    class Products(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
                a, b = args[-2:]
                self.made += a.shape[0] * a.shape[1] * b.shape[1]
            return func(*args, **(kwargs or {}))

    product = TOKENS * WIDTH * CLASSES
    with Products() as of_tiles:
        linear_cross_entropy([(hidden, weight)], None, targets, ODD).sum().backward()
    with Products() as of_one:
        one_pass_cross_entropy([(hidden, weight)], None, targets, ODD)[0].backward()
    assert (of_tiles.made, of_one.made) == (4 * product, 3 * product)


def test_one_pass_can_be_differentiated_again_and_leaves_frozen_weights_alone() -> None:
    (hidden, weight, _), targets = case(torch.float32)
    total, losses = one_pass_cross_entropy([(hidden, weight.detach())], None, targets, ODD)
    first = torch.autograd.grad(3 * total, [hidden], retain_graph=True)[0]
    second = torch.autograd.grad(total, [hidden])[0]
    torch.testing.assert_close(first, 3 * second)
    assert not losses.requires_grad and torch.equal(losses == 0, targets == -100)


def test_memory_of_one_pass_is_the_gradient_of_the_weight_and_a_chunk() -> None:
    tokens, classes, width, chunk = 512, 16384, 32, 16

    def one(leaves: list[Any], targets: torch.Tensor, settings: TileSettings) -> torch.Tensor:
        return summed(leaves, targets, replace(settings, chunk_tokens=chunk))

    found = peak(one, tokens, classes, width, torch.float32)
    sums, of_chunk = 4 * width * (classes + tokens), 4 * chunk * classes
    assert sums + of_chunk < found < 2 * sums + 2 * of_chunk
