"""Runs one and two layers of a model at two lengths on a device, and measures what they keep: seconds.

A layer keeps the difference between two layers and one at the end of the forward pass, so embeddings and head do not
matter. Layers have their real sizes. On a GPU the statistics of PyTorch's caching allocator are read; weights are
zeros, only sizes count. On the CPU allocations of fake tensors are counted (``FakeTensorMode``): every
operation runs with its shapes, without values, so that 8B take as long as a tiny model. Where a shape depends on values
the tensors are real, within :data:`LIMIT`.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedFakeTensorException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_trainer.planner.activations.probe import gpu_dropout
from ds_trainer.planner.activations.probed import Probe
from ds_trainer.planner.layer_sizes import layer_sizes
from ds_trainer.planner.meta_model import meta_model
from ds_trainer.planner.module_stacks import module_transformer
from ds_trainer.planner.parameters.modules import module_parameters
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

LENGTHS = {"cpu": (64, 128), "cuda": (1024, 2048), "fake": (64, 128)}
"""Tokens of a sequence in the runs."""
LIMIT = 60.0
"""Seconds that a probe with real tensors may take on the CPU, as its first run tells."""
_PASSES = 9  # what the four runs take, in units of the first: one and two layers, 64 and 128 tokens
_ROWS_ON_CPU = 8192  # of the vocabulary: the products with it would take most of the time
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def probe_device(
    model: PlannedModel, config: Mapping[str, Any], device: str = "", number_format: str = "bf16", batch: int = 1
) -> Probe:
    """Measure a model on a device.

    Args:
        model: as the planner knows it.
        config: its configuration, of transformers.
        device: ``cuda`` or ``cpu``; default: a GPU if there is one.
        number_format: ``bf16`` or ``fp32``.
        batch: sequences of a run.

    Raises:
        ConfigError: the model is no decoder of which one layer can be made, or what was measured is not credible.
    """
    began = time.perf_counter()
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if len(model.transformer.stacks) != 1 or model.transformer.kind != "decoder":
        raise ConfigError(f"--probe: {model.name} has several stacks of layers, of which one layer cannot be made.")
    if kind == "cpu":
        try:
            return _probed(model, config, "fake", number_format, batch, began)
        except UnsupportedFakeTensorException as error:  # a shape depends on values
            logger.info("The probe runs with real tensors: %s", str(error).splitlines()[0])
    return _probed(model, config, kind, number_format, batch, began)


def _probed(
    model: PlannedModel, config: Mapping[str, Any], kind: str, number_format: str, batch: int, began: float
) -> Probe:
    lengths = LENGTHS[kind]
    kept: dict[tuple[int, int], float] = {}
    loss = 1.0
    device_facts: tuple[float | None, float | None] = (None, None)
    for layers in (1, 2):
        module = _module(model, config, layers, kind, number_format)
        if kind == "cuda" and layers == 1:  # the first run allocates work space of libraries, which stays
            _ProbeRun(module, kind).measure(batch, lengths[0])
        for length in lengths:
            if kind == "cuda":  # what earlier runs left in the allocator is no fragmentation
                gc.collect()
                torch.cuda.empty_cache()
            start = time.perf_counter()
            run = _ProbeRun(module, kind).measure(batch, length)
            kept[layers, length] = run.kept
            if kind == "cpu" and len(kept) == 1:
                _refuse_long(model, time.perf_counter() - start)
        if layers == 2:
            loss = _loss_ratio(module, run.loss, batch * lengths[1], lengths[1], number_format)
            if kind == "cuda":
                # Bytes of the device that no tensor of this process uses, and the share that is reserved beyond
                # tensors.
                free, total = torch.cuda.mem_get_info()
                reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
                device_facts = float(total - free - torch.cuda.memory_reserved()), max(0.0, reserved / allocated - 1)
        del module
        gc.collect()
    layer = tuple((kept[2, length] - kept[1, length]) / (batch * length) for length in lengths)
    name = torch.cuda.get_device_name() if kind == "cuda" else "the CPU"
    context, fragmentation = device_facts
    seconds = time.perf_counter() - began
    made = Probe(
        device=name,
        attention="sdpa",
        number_format=number_format,
        lengths=lengths,
        layer=(layer[0], layer[1]),
        loss=loss,
        context=context,
        fragmentation=fragmentation,
        seconds=seconds,
    )
    predicted = predicted_layer(model, made)
    if not made.is_credible(predicted):
        raise ConfigError(
            f"--probe: on {name} a layer of {model.name} keeps {layer[1]:,.0f} bytes a token instead of "
            f"{predicted:,.0f}, logits and loss take {loss:.2f} times what is predicted. This is no correction."
        )
    return made


def _refuse_long(model: PlannedModel, seconds: float) -> None:
    """Raises if the runs would take longer than :data:`LIMIT`, of which the first took ``seconds``."""
    if _PASSES * seconds > LIMIT:
        raise ConfigError(
            f"--probe: on this CPU the runs of {model.name} would take about {_PASSES * seconds:.0f} s, more than "
            f"{LIMIT:.0f}. Run it on a machine with a GPU, or leave --probe out."
        )


def predicted_layer(model: PlannedModel, probe: Probe) -> float:
    """Bytes per token that a layer keeps at the longer length, as the formulas say."""
    formulas, _ = model.activations(probe.attention, probe.number_format)
    return formulas.bytes_per_token(layer_sizes(model.stack, model.rows, probe.lengths[1])).layer


def describe(model: PlannedModel, probe: Probe) -> str:
    """Predicted and measured values, in one line."""
    predicted, measured = predicted_layer(model, probe), probe.layer[1]
    text = (
        f"Probed on {probe.device} in {probe.seconds:.1f} s: a layer keeps {measured:,.0f} bytes a token (predicted "
        f"{predicted:,.0f}, x {measured / predicted:.3f}); logits and loss x {probe.loss:.3f} of what is predicted"
    )
    if probe.fragmentation is not None and probe.context is not None:
        text += f"; fragmentation {probe.fragmentation:.1%}, context {probe.context / 1e9:.2f} GB"
    return f"{text}. The plans are corrected by it."


def _module(model: PlannedModel, config: Mapping[str, Any], layers: int, kind: str, number_format: str) -> nn.Module:
    """The model with fewer layers, with weights of zeros."""
    values = dict(config)
    for name in _LAYERS:
        if name in values:
            values[name] = layers
    if isinstance(values.get("layer_types"), list):
        values["layer_types"] = values["layer_types"][:layers]
    if kind == "cpu" and int(values.get("vocab_size") or 0) > _ROWS_ON_CPU:
        values["vocab_size"] = _ROWS_ON_CPU
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values[name] = 0
    values["use_cache"] = False
    module = meta_model(values, model.name).to(_DTYPES[number_format])
    if kind == "fake":
        _fake_weights(module)
        return module.train()
    module = module.to_empty(device=kind)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
    return module.train()


def _fake_weights(module: nn.Module) -> None:
    """Replace parameters and buffers on the meta device by fake ones on the CPU; tied ones stay tied."""
    mode = FakeTensorMode()
    made: dict[int, Any] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                tensors[name] = made[id(tensor)]


@contextlib.contextmanager
def _one_sequence() -> Iterator[None]:
    """Without a look at the positions, rows are one sequence: transformers makes a mask where it sees fake tensors."""
    masks = sys.modules.get("transformers.masking_utils")
    look = getattr(masks, "find_packed_sequence_indices", None)
    if look is None:
        yield
        return
    setattr(masks, look.__name__, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masks, look.__name__, look)


class _ProbeRun:
    """One forward and backward pass.

    Attributes:
        kept: bytes that exist before the LM head, or at the end of the last layer's forward pass without a head,
            beyond what existed before.
        loss: most bytes from the end of the last layer until the gradient of the logits exists, beyond what existed
            then.
    """

    def __init__(self, module: nn.Module, kind: str) -> None:
        self.kept = self.loss = self._after_layers = 0.0
        self._module, self._live = module, None if kind == "cuda" else LiveTensors()
        first = next(module.parameters())
        self._fake: Any = contextlib.nullcontext()
        if isinstance(first, FakeTensor):  # what is made in the forward pass must be fake too
            self._fake = first.fake_mode
        self._layers = next(
            part for part in module.modules() if isinstance(part, nn.ModuleList) and 1 <= len(part) <= 2
        )
        if self._live is not None:
            self._live.ignore((*module.parameters(), *module.buffers()))

    def measure(self, batch: int, length: int) -> _ProbeRun:
        """Run it on sequences of ``length`` tokens."""
        module: Any = self._module
        device = next(module.parameters()).device
        with self._fake:
            ids = torch.zeros(batch, length, dtype=torch.long, device=device)
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        handles = [self._layers[-1].register_forward_hook(lambda *_: self._end_of_layers())]
        if head is not None:
            handles.append(head.register_forward_pre_hook(lambda *_: self._end_of_model()))
            handles.append(head.register_forward_hook(self._watch))
        module.zero_grad(set_to_none=True)
        try:
            with gpu_dropout(), _one_sequence():
                if self._live is None:
                    self._before = self._now()
                    module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                else:
                    with self._fake, self._live:
                        self._before = self._now()
                        module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        return self

    def _end_of_layers(self) -> None:
        self.kept = self._after_layers = self._now() - self._before
        if self._live is not None:
            self._live.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats()

    def _end_of_model(self) -> None:  # nothing holds the input of the last layer any more but autograd
        self.kept = self._now() - self._before

    def _watch(self, head: nn.Module, given: Any, logits: torch.Tensor) -> None:
        logits.register_hook(self._gradient)

    def _gradient(self, gradient: torch.Tensor) -> None:
        peak = self._live.peak if self._live is not None else torch.cuda.max_memory_allocated()
        self.loss = peak - self._before - self._after_layers

    def _now(self) -> int:
        return self._live.now if self._live is not None else torch.cuda.memory_allocated()


def _loss_ratio(module: nn.Module, measured: float, tokens: int, length: int, number_format: str) -> float:
    """Measured / predicted bytes of logits and loss of the module as it ran: its vocabulary may be smaller."""
    if not measured:
        return 1.0
    transformer = module_transformer(module, tuple(module_parameters(module)))
    planned = PlannedModel.from_module(module)
    formulas, _ = planned.activations("sdpa", number_format)
    sizes = layer_sizes(transformer.stacks[-1], transformer.vocabulary, length)
    return measured / (tokens * formulas.bytes_per_token(sizes).loss)


class LiveTensors(TorchDispatchMode):
    """Counts the storages that operations return while the mode is active, until they are freed.

    Tensors that an operator uses inside (work space of a kernel) are not seen, nor are those that existed before.

    Attributes:
        now: bytes of the storages that exist.
        peak: largest value of ``now`` since :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # by address

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out tensors that exist: an operation that returns a view of one does not count its storage."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._sizes[storage._cdata] = storage.nbytes()

    def reset_peak(self) -> None:
        """Begin a new peak with what exists now."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self._add(value.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(address)
        if known == size:
            return
        if known is None:
            weakref.finalize(storage, self._remove, address)
        self._sizes[address] = size
        self.now += size - (known or 0)  # resized in place otherwise
        self.peak = max(self.peak, self.now)

    def _remove(self, address: int) -> None:
        self.now -= self._sizes.pop(address)
