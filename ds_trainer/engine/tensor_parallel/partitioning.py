"""Completes DeepSpeed's partitioning of a model, before the optimizer is built over the slices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.tensor_parallel.partition_check import dense_plan, is_lora
from ds_trainer.engine.tensor_parallel.repairs import mark_sliced_embeddings, repair_layers
from ds_trainer.engine.tensor_parallel.slices import is_sliced
from ds_trainer.engine.tensor_parallel.vocab_parallel_head import custom_loss_function, install_logit_gathering
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_HEAD = "get_output_embeddings"
_REMEDY = (
    "Configure the layers in tensor_parallel.partition_config of the DeepSpeed configuration, or set "
    "tensor_parallel_size=1."
)


@contextmanager
def complete_partitioning(groups: ParallelGroups, gather_logits: bool) -> Iterator[None]:
    """Inside, constructing an engine also completes DeepSpeed's partitioning of the model.

    Args:
        groups: the process groups; the slices are distributed over ``tp``.
        gather_logits: code other than the model's own loss reads logits in training.

    Raises:
        ConfigError: DeepSpeed partitioned no parameter.
    """
    if groups.layout.tp == 1:
        yield
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine._apply_autotp_partitioning

    def partition(engine: Any, model: nn.Module, settings: Any) -> Any:
        if getattr(model, "ds_autotp_parsed", False):
            return original(engine, model, settings)  # an earlier engine has completed it
        given_loss, inner = custom_loss_function(model), _transformers_model(model)
        own_loss = getattr(model, "loss_function", None)
        with (
            partition_lora_layers(),
            partition_embeddings_in_place(),
            _on_the_host(settings),
            _input_embeddings_may_be_missing(inner),
            _head_left_whole(inner),
            _experts_left_whole(),
        ):
            try:
                replaced = original(engine, inner, settings)
            except AssertionError as error:
                raise ConfigError(
                    f"tensor_parallel_size={groups.layout.tp}: DeepSpeed does not know how to partition "
                    f"{type(inner).__name__}: {error} {_REMEDY}"
                ) from error
        model.ds_autotp_parsed = True  # type: ignore[assignment]
        mark_sliced_embeddings(model, groups.tp)
        if not any(is_sliced(parameter) for parameter in model.parameters()):
            raise ConfigError(
                f"tensor_parallel_size={groups.layout.tp}, but DeepSpeed partitioned no parameter of "
                f"{type(model).__name__}: every rank would compute the same. {_REMEDY}"
            )
        install_logit_gathering(model, gather_logits, given_loss, own_loss)
        separate_randomness(model, groups)
        return replaced

    repair_layers()
    DeepSpeedEngine._apply_autotp_partitioning = partition
    try:
        yield
    finally:
        DeepSpeedEngine._apply_autotp_partitioning = original


def _transformers_model(model: nn.Module) -> nn.Module:
    """The transformers model in a wrapper (sentence-transformers), if there is one; otherwise ``model``.

    DeepSpeed finds the layers by the names of its modules, and reads the number of heads from its configuration.
    """
    parts: list[nn.Module] = []
    for part in model.modules():  # parents before their children
        inside = any(part is inner for found in parts for inner in found.modules())
        if hasattr(type(part), "config_class") and not inside:
            parts.append(part)
    return parts[0] if len(parts) == 1 else model


@contextmanager
def _on_the_host(settings: Any) -> Iterator[None]:
    """Inside, slices stay on the device of the full tensors; they move to the GPU one at a time later.

    DeepSpeed would move every slice to the GPU at once, where ZeRO-3 should hold only shards. The switch is reset
    afterwards, because DeepSpeed also reads it when a gathered weight is partitioned again.
    """
    from deepspeed.module_inject.layers import TensorParallel_Layer

    settings.keep_module_on_host = True
    try:
        yield
    finally:
        TensorParallel_Layer.set_keep_module_on_host(False)


@contextmanager
def _experts_left_whole() -> Iterator[None]:
    """Inside, DeepSpeed reads the plan of a model without its stacked experts, whose styles it does not know."""
    from deepspeed.runtime.tensor_parallel import config

    original = config._get_hf_tp_plan
    config._get_hf_tp_plan = lambda model: dense_plan(model, original(model))
    try:
        yield
    finally:
        config._get_hf_tp_plan = original


@contextmanager
def _head_left_whole(model: nn.Module) -> Iterator[None]:
    """Inside, the plan of a model with a replaced ``forward`` leaves its output embedding whole.

    Such a forward, like that of TRL, multiplies by the weight of the head itself, in pieces. A slice of the weight
    would give the logits of a part of the vocabulary.
    """
    core = next((part for part in model.modules() if "forward" in vars(part) and hasattr(part, _HEAD)), None)
    plan: Any = getattr(core, "_tp_plan", None) or {}
    head = getattr(core, _HEAD)() if core is not None and plan else None
    names = [name for name, part in core.named_modules() if part is head and name in plan] if core is not None else []
    if not names:
        yield
        return
    logger.info("%s.forward was replaced, so %s is not partitioned.", type(core).__name__, ", ".join(names))
    own = vars(model).get("_tp_plan")
    # The plan of the instance overrides that of the class; of the styles, this one means that a layer stays whole.
    core_plan: Any = {**plan, **dict.fromkeys(names, "embedding_rowwise")}
    model._tp_plan = core_plan
    try:
        yield
    finally:
        del model._tp_plan
        if own is not None:
            model._tp_plan = own


@contextmanager
def _input_embeddings_may_be_missing(model: Any) -> Iterator[None]:
    """DeepSpeed 0.19.8 calls ``get_input_embeddings()``, which models with two towers (CLIP) do not implement.

    It only needs the result for a tied embedding that is not an ``nn.Embedding``; others it finds itself.
    """
    getter = getattr(model, "get_input_embeddings", None)
    try:
        if getter is not None:
            getter()
        missing = False
    except NotImplementedError:
        missing = True
        model.get_input_embeddings = lambda: None
    try:
        yield
    finally:
        if missing:
            del model.get_input_embeddings


# Embeddings that tensor parallelism partitions along their width.
#
# Without a plan DeepSpeed partitions embeddings inside layers (T5's relative positions, one column per head). It copies
# a slice to the device and back into a new embedding, which is impossible for a weight on the meta device, and an
# existing optimizer still refers to the old parameter. Here the parameter object stays the same and its data becomes
# the slice.


@contextmanager
def partition_embeddings_in_place() -> Iterator[None]:
    """Inside, embeddings that DeepSpeed partitions keep their parameter object."""
    from deepspeed.module_inject.auto_tp import AutoTP

    original = AutoTP._slice_embedding

    def partition(cutter: Any, child: Any, name: str, conv_linear_layer: bool) -> Any:
        tied = {*cutter._tied_row_parallel_embedding_ids}
        if cutter.vocab_parallel_lm_head:
            tied |= {*cutter._tied_vocab_parallel_embedding_ids}
        if getattr(child, "replaced", False) or id(child) in tied:
            return original(cutter, child, name, conv_linear_layer)  # does nothing
        cutter._gather_zero3_params(child)
        _partition(cutter, child, name)
        return child

    AutoTP._slice_embedding = partition
    try:
        yield
    finally:
        AutoTP._slice_embedding = original


def _partition(cutter: Any, embedding: nn.Embedding, name: str) -> None:
    from deepspeed import comm
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
    from deepspeed.module_inject.layers import _build_param_uc_restore_meta
    from deepspeed.module_inject.tp_shard import get_shard_size_list

    weight = embedding.weight
    shape = tuple(weight.shape)
    sizes = get_shard_size_list(shape[1], cutter.mp_size, cutter.tp_meta, name)
    weight.data = weight.data.split(sizes, dim=1)[comm.get_rank(group=cutter.mp_group)]
    embedding.embedding_dim = weight.shape[1]
    meta = _build_param_uc_restore_meta(
        partition_type="row",
        partition_dim=1,
        logical_shape=shape,
        output_shape=shape,
        partition_sizes=sizes,
        target_partition_shape=tuple(weight.shape),
        original_shape=shape,
    )
    setattr(weight, DS_AUTOTP_UC_META, meta)
    embedding.replaced = True  # type: ignore[assignment]  # DeepSpeed's mark of processed modules


# Random numbers of tensor-parallel ranks: equal for replicated activations, different for partitioned ones.
#
# The ranks of a tensor-parallel group run with the same state of the default generators. Between a column-parallel and
# the next row-parallel layer each rank works on different values (its heads, its part of the MLP): there the generators
# are reseeded from a common draw and the rank, and afterwards restored to their state after the draw.
#
# So there is no state other than that of the default generators: checkpoints save it, and a recomputation, which starts
# with the state of its forward pass, draws the same masks. The generator's seed tells whether a region is active,
# because a recomputation may stop in the middle of a region.


_SEEDS = 2**62
_STRIDE = 0x1E3779B97F4A7C15  # odd: distant seeds for neighboring ranks


def dropout_names(model: nn.Module) -> list[str]:
    """Names of dropouts in ``model``: ``nn.Dropout`` modules and attributes named like it, with a rate above 0."""
    names = []
    for name, module in model.named_modules():
        rates = [(key, value) for key, value in vars(module).items() if "drop" in key]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append(("p", module.p))
        names += [f"{name}.{key}" for key, rate in rates if isinstance(rate, float) and rate > 0.0]
    return names


class SlicedRegion:
    """Switches the generators between a column- and a row-parallel layer."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seed: int | None = None
        self._outside: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def enter(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """After a column-parallel layer."""
        if not module.training or torch.initial_seed() == self._seed:
            return
        drawn = int(torch.randint(_SEEDS, (), dtype=torch.int64))
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._outside = (torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None)
        self._seed = (drawn + (self._rank + 1) * _STRIDE) % _SEEDS
        torch.manual_seed(self._seed)

    def leave(self, module: nn.Module, arguments: Any) -> None:
        """Before a row-parallel layer."""
        if self._outside is None or torch.initial_seed() != self._seed:
            return
        on_host, on_gpu = self._outside
        torch.set_rng_state(on_host)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)


def separate_randomness(model: nn.Module, groups: ParallelGroups) -> None:
    """Makes the partitioned parts of ``model`` draw different random numbers on each tensor-parallel rank."""
    from deepspeed.module_inject import layers

    if not dropout_names(model):
        return
    region = SlicedRegion(groups.coordinates.tp)
    for module in model.modules():
        if isinstance(module, (layers.LinearAllreduce, layers.SubParamLinearAllreduce)):
            module.register_forward_pre_hook(region.leave)
        elif isinstance(module, (layers.LinearLayer, layers.SubParamLinearLayer)):
            gathered = getattr(module, "gather_output", False) or isinstance(module, layers.VocabParallelLinear)
            if not gathered:
                module.register_forward_hook(region.enter)


# LoRA layers under tensor parallelism: partitions an adapter like the layer that it belongs to.
#
# A rank holds some outputs of a column-parallel layer ``W x``, so in ``W x + B A x`` it needs those rows of ``B`` and
# all of ``A``. It holds some inputs of a row-parallel layer, so it needs those columns of ``A`` and all of ``B``.
# DeepSpeed itself treats a LoRA layer as a plain linear layer and would drop the adapter.


@contextmanager
def partition_lora_layers() -> Iterator[None]:
    """Inside, DeepSpeed partitions LoRA layers together with the layers that they wrap."""
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import PartitionType

    original = AutoTP._replace_with_config

    def replace(cutter: Any, child: Any, name: str) -> Any:
        if not is_lora(child):
            return original(cutter, child, name)
        spec = cutter.partition_config.find_matching_spec(f"{name}.weight", cutter._get_model_type())
        if spec is None or spec.partition_type == PartitionType.SKIP:
            return child
        by_row = spec.partition_type == PartitionType.ROW
        make = cutter._create_row_parallel_layer if by_row else cutter._create_column_parallel_layer
        adapters = child.lora_A if by_row else child.lora_B
        # The name determines the number of heads per rank, so all parts use the same one.
        for owner, part in ((child, "base_layer"), *((adapters, key) for key in adapters)):
            layer = owner._modules[part]
            cutter._gather_zero3_params(layer)
            owner._modules[part] = make(layer, spec, name)
        child.replaced = True
        return child

    AutoTP._replace_with_config = replace
    try:
        yield
    finally:
        AutoTP._replace_with_config = original
