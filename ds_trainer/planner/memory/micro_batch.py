"""``MicroBatch``: bytes of the activations of a micro-batch on a rank, at the moments of its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_trainer.planner.activations.formula import BytesPerToken
from ds_trainer.planner.candidate import CHUNK_TOKENS, Candidate
from ds_trainer.planner.layer_sizes import layer_sizes
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.transformer_shape import Stack

_IN_TRANSFER = 2  # inputs of layers that are on their way to or from host memory


@dataclass(frozen=True)
class MicroBatch:
    """Bytes of activations of one micro-batch.

    Attributes:
        kept: what all layers keep from the forward to the backward pass: everything that the backward pass reads, or
            with activation checkpointing the input of each layer.
        layer: what the first layer keeps, checkpointed or not.
        recomputed: what a layer's recomputation makes before its backward pass; 0 without checkpointing.
        recomputed_last: the same for the last layer.
        forward: what exists in addition in a layer's forward pass; a recomputed one runs without gradients.
        backward: what exists in addition in a layer's backward pass.
        loss: what exists in addition from the last layer's forward to its backward pass: logits, loss, gradients.
        evaluation: what exists at most in a forward pass without gradients: a layer, or logits and loss in float32.
        output: the last layer's output.
        logits: the logits, or their gradient, in the dtype of the model.
        last_norm: what the last norm and the LM head keep, which exists while the head's gradient is made.
        norm_backward: what exists in addition in the last norm's backward pass.
        output_gradient: the gradient of the last layer's output, which a chunked loss adds in float32 and then casts.
        offloaded: what is kept in host memory instead.
    """

    kept: float
    layer: float
    recomputed: float
    recomputed_last: float
    forward: float
    backward: float
    loss: float
    logits: float
    last_norm: float
    norm_backward: float
    output_gradient: float
    output: float
    evaluation: float
    offloaded: float


def micro_batch(model: PlannedModel, run: Candidate) -> MicroBatch:
    """The bytes of a micro-batch of ``run``, from the formulas of :mod:`ds_trainer.planner.activations`."""
    before = sum(_kept(model, run, stack) for stack in model.transformer.stacks[:-1])
    stack = model.stack
    kind = (run.attention, run.number_format)
    formulas, _ = model.activations(*kind)
    sizes = layer_sizes(stack, model.rows, run.length, tp=run.tp, cp=run.cp)
    tokens = _tokens(run, stack)
    if run.chunked_loss:
        sizes["vocabulary"] *= min(1.0, CHUNK_TOKENS / tokens)
    tiles_norms = False
    size = model.bytes_per_token(sizes, *kind)
    if run.tiled_mlp:
        tiled = tiled_layer(model, sizes, kind, run.weight_bytes, tokens)
        size, sizes, tiles_norms = tiled.found, dict(tiled.sizes), tiled.norms
    everything, forward = tokens * size.layer, tokens * size.forward
    if run.ep > 1:  # results that return are kept, and more rows where experts get more tokens
        rows = tokens * run.weight_bytes * sizes["active"]
        exchanged = rows * (
            sizes["hidden"] + (model.imbalance(run.ep) - 1) * (2 * sizes["hidden"] + 3 * sizes["inner"])
        )
        everything, forward = everything + exchanged, forward + exchanged + rows * sizes["hidden"]
    if run.sp > 1:  # the output of attention is kept by heads and by tokens
        everything += tokens * run.weight_bytes * sizes["queries"]
        forward += tokens * run.weight_bytes * sizes["queries"]
    trains_norms = any(group.kind == "norm" for group in model.trained_parameters)
    if not trains_norms:  # then nothing reads what two norms of a layer made before they scaled it
        everything -= tokens * 2 * run.weight_bytes * sizes["hidden"]
        forward -= tokens * 2 * run.weight_bytes * sizes["hidden"]
    without_gradients = tokens * _largest_without_gradients(sizes, run.weight_bytes, size.forward, tiles_norms)
    headless = {**sizes, "vocabulary": 0.0}
    last_norm, norm_backward = formulas.outside.bytes_per_token(headless), formulas.bytes_per_token(headless).loss
    if tiles_norms:  # its output; the gradients of its output and input
        last_norm, norm_backward = (count * run.weight_bytes * sizes["hidden"] for count in (1, 2))
    share = 1.0 if run.eval_micro_batch is None else run.eval_micro_batch / run.micro_batch
    logits = tokens * sizes["vocabulary"]
    # Float32 logits exist twice, those of 16 bits too; a slice of the vocabulary is gathered to them.
    evaluated = (8 + (4 / run.tp if run.tp > 1 else 0)) if run.weight_bytes == 4 else 10
    boundary = tokens * run.weight_bytes * sizes["hidden"]
    layer = boundary if run.checkpointing else everything
    again = everything - boundary if tiles_norms else everything  # a tiled norm keeps the input, which exists already
    inputs = run.checkpointed_layers(stack.layers)
    recomputes_last = run.checkpointing and (stack.layers - 1) % run.every_n_layers == 0
    on_device = min(inputs, _IN_TRANSFER) if run.offload_activations else inputs
    return MicroBatch(
        kept=boundary * on_device + everything * (stack.layers - inputs) + before,
        offloaded=boundary * (inputs - on_device),
        layer=layer,
        recomputed=again if run.checkpointing else 0.0,
        recomputed_last=again if recomputes_last else 0.0,
        forward=max(without_gradients, forward - everything - boundary) if recomputes_last else forward - everything,
        backward=tokens * size.backward + (model.imbalance(run.ep) * rows * sizes["hidden"] if run.ep > 1 else 0.0),
        loss=tokens * size.loss,
        output=boundary,
        output_gradient=boundary + tokens * 4 * sizes["hidden"] * (run.weight_bytes < 4) if run.chunked_loss else 0.0,
        logits=run.weight_bytes * logits,
        last_norm=tokens * last_norm * trains_norms,
        norm_backward=tokens * norm_backward * trains_norms,
        evaluation=share * (boundary + max(without_gradients, logits * evaluated)),
    )


def _largest_without_gradients(sizes: Mapping[str, float], width: int, forward: float, tiles_norms: bool) -> float:
    """Bytes per token that exist at most in a layer's forward pass which keeps nothing.

    In the MLP: two projections and their product, the input and the residual. In attention: the input, queries, those
    that are rotated and two steps between them, keys and values. In a norm: the input, and two in float32.
    """
    hidden, inner = sizes["hidden"], sizes["inner"] * sizes["active"]
    mlp = width * (2 * hidden + 3 * inner)
    attention = width * (hidden + 4 * sizes["queries"] + 2 * sizes["keys"])
    norm = 0.0 if tiles_norms else (width + 8) * hidden
    return min(forward, max(mlp, attention, norm))


def _kept(model: PlannedModel, run: Candidate, stack: Stack) -> float:
    """What the layers of an encoder or of a tower keep."""
    sizes = layer_sizes(stack, 0, stack.positions or run.length, tp=run.tp, cp=run.cp)
    inputs = run.checkpointed_layers(stack.layers)
    size = run.weight_bytes * sizes["hidden"] * inputs
    if inputs < stack.layers:
        formulas, _ = model.activations(run.attention, run.number_format, stack)
        size += formulas.bytes_per_token(sizes).layer * (stack.layers - inputs)
    return _tokens(run, stack) * size


def _tokens(run: Candidate, stack: Stack) -> float:
    """Positions of a rank in a micro-batch: a tower has its own, of one image a sequence."""
    return run.tokens if stack.positions is None else float(run.micro_batch * stack.positions)


# Bytes per token of a layer whose MLP and norms run on a tile of tokens at a time.
#
# A tiled module keeps its input; what it makes exists for a tile, as many tokens as the model is wide, in its forward
# and again in its backward pass. A norm that is composed in Python (Llama's) keeps its input and output instead of two
# more tensors of 4 bytes; one that is a single kernel keeps nothing else anyway.
#
# Source: ``ds_trainer.engine.tiling``; allocations of a layer of 8B were counted with fake tensors
# (``tests/planner/memory/test_tiled.py``).

_NORM_KEEPS = 4  # bytes of an element beyond input and output, for each of two norms
_SUMS = 9  # bytes of an element of the MLP's matrices: sums of gradients in float32, a tile's, most final ones


@dataclass(frozen=True)
class TiledLayer:
    """Bytes per token.

    Attributes:
        found: what the layer keeps, and what exists in its passes and in the loss.
        sizes: the dimensions, the inner one for a tile.
        norms: whether the norms are tiled too.
    """

    found: BytesPerToken
    sizes: Mapping[str, float]
    norms: bool


def tiled_layer(
    model: PlannedModel, sizes: Mapping[str, float], kind: tuple[str, str], width: int, tokens: float
) -> TiledLayer:
    """A layer with a tiled MLP, and tiled norms if they are composed in Python.

    Args:
        model: the model.
        sizes: dimensions of a layer of a rank.
        kind: attention and number format.
        width: bytes of a weight.
        tokens: how many a rank has in a micro-batch.
    """
    formulas, _ = model.activations(*kind)
    share = min(1.0, sizes["hidden"] / tokens)
    whole = model.bytes_per_token(sizes, *kind).layer
    kept = model.bytes_per_token({**sizes, "inner": 0}, *kind).layer
    small = {**sizes, "inner": share * sizes["inner"]}
    size, tile = model.bytes_per_token(small, *kind), share * (whole - kept)
    # Whether two norms of a layer keep more than a single kernel would: input, output and two numbers a token.
    norms = (formulas.layer.terms.get("hidden", 0) >= 2 * (_NORM_KEEPS + 2 * width)) and share < 1
    if not norms:
        return TiledLayer(size._replace(layer=kept, backward=size.backward + tile), small, False)
    hidden, queries, keys = sizes["hidden"], sizes["queries"], sizes["keys"]
    kept -= 2 * _NORM_KEEPS * hidden
    attention = width * (hidden + queries + 2 * keys)  # gradients of the residual, of queries, keys and values
    matrices = model.stack.mlp_matrices * hidden * sizes["inner"]
    mlp = 2 * width * hidden + tile + _SUMS * matrices / tokens
    loss = formulas.bytes_per_token({**small, "hidden": 0.0}).loss + 2 * width * hidden
    return TiledLayer(BytesPerToken(kept, kept + width * hidden, max(attention, mlp), loss), small, True)
