"""Any shard or partition of a parameter is read, and no byte of the files that is not needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Interleave, Split, Transpose, WeightConverter

from ds_trainer.checkpoint.loading.file_weights import FileWeights, open_weights
from ds_trainer.checkpoint.loading.name_mapping import WeightConversion, map_names
from ds_trainer.checkpoint.loading.range_reader import RangeReader
from ds_trainer.checkpoint.loading.stored_tensors import stored_tensors
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common
from tests.checkpoint.loading.tiny_models import KINDS, make, on_meta

SMALLEST = 4 * 4096  # buffer: four chunks


class FusedLlama(transformers.LlamaForCausalLM):
    """A Llama whose files have fused, transposed and interleaved weights."""


register_checkpoint_conversion_mapping(
    "FusedLlama",
    [
        WeightConverter(["mlp.gate_up.weight"], ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)]),
        WeightConverter(
            ["self_attn.qkv.weight"],
            ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
            [Split(dim=0)],
        ),
        WeightConverter("self_attn.out.weight", "self_attn.o_proj.weight", [Transpose(0, 1)]),
        WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Interleave(dim=0)]),
    ],
    overwrite=True,
)


def write_fused(directory: Path) -> None:
    """Files of a :class:`FusedLlama` with the weights of a Llama."""
    model = make("llama")
    model.save_pretrained(directory)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        take = lambda name, prefix=prefix: state.pop(prefix + name + ".weight")  # noqa: E731
        state[prefix + "mlp.gate_up.weight"] = torch.cat([take("mlp.gate_proj"), take("mlp.up_proj")])
        qkv = [take(f"self_attn.{one}_proj") for one in "qkv"]
        state[prefix + "self_attn.qkv.weight"] = torch.cat(qkv)
        state[prefix + "self_attn.out.weight"] = take("self_attn.o_proj").t().contiguous()
        state[prefix + "mlp.down.weight"] = take("mlp.down_proj")
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def opened(directory: Path, model: Any, traced: bool) -> FileWeights:
    stored = stored_tensors(directory)
    reader = RangeReader(SMALLEST)
    return FileWeights(directory, model, stored, map_names(model, stored, None, traced), reader)


class Case:
    """A directory read by parts, the same one read by computing every conversion whole, and the right weights."""

    def __init__(self, directory: Path, model_class: Any, config: Any) -> None:
        self.state = model_class.from_pretrained(directory).state_dict()
        model = on_meta(model_class, config)
        self.weights = opened(directory, model, True)
        self.computed = opened(directory, model, False)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    found = {}
    for kind in ("llama", "qwen3_moe", "mixtral", "gpt2", "wav2vec2"):
        directory = tmp_path_factory.mktemp("model")
        make(kind).save_pretrained(directory, max_shard_size="20KB")
        found[kind] = Case(directory, *KINDS[kind]())
    directory = tmp_path_factory.mktemp("fused")
    write_fused(directory)
    found["fused"] = Case(directory, FusedLlama, KINDS["llama"]()[1])
    transposed = tmp_path_factory.mktemp("bin")
    state = {
        key: tensor.transpose(0, -1).contiguous().transpose(0, -1) for key, tensor in found["mixtral"].state.items()
    }
    make("mixtral").config.save_pretrained(transposed)
    torch.save(state, transposed / "pytorch_model.bin")
    found["bin"] = Case(transposed, *KINDS["mixtral"]())
    yield found
    for case in found.values():
        case.weights.close()
        case.computed.close()


@st.composite
def shard_slices(draw: st.DrawFn, shape: tuple[int, ...]) -> ShardSlice:
    """A run of the whole, of a slice, or of a slice of several bands."""
    full = ShardSlice.whole(shape)
    if not shape or draw(st.booleans()):
        sliced = full
    else:
        dim = draw(st.integers(0, len(shape) - 1))
        size = shape[dim]
        boundaries = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=4)))
        bands = tuple((a, b - a) for a, b in zip(boundaries[::2], boundaries[1::2], strict=False))
        if draw(st.booleans()):
            bands = bands[::-1]
        sliced = ShardSlice(shape, 0, 0, dim, bands)
    bounds = [draw(st.integers(0, sliced.slice_numel)) for _ in range(2)]
    return sliced.run(min(bounds), max(bounds))


def elements_of(tensor: torch.Tensor, shard_slice: ShardSlice) -> torch.Tensor:
    """The oracle: the same elements of the whole tensor."""
    target = torch.empty(len(shard_slice), dtype=tensor.dtype)
    copy_common(target, shard_slice, tensor.reshape(-1), ShardSlice.whole(tensor.shape))
    return target


def test_only_interleaved_weights_are_computed(cases: dict[str, Case]) -> None:
    """Only the interleaved weights have to be computed."""
    computed = {name for name, one in cases["fused"].weights._tensors.items() if isinstance(one, WeightConversion)}
    assert computed == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
    others = [case.weights for kind, case in cases.items() if kind != "fused"]
    assert not any(isinstance(one, WeightConversion) for weights in others for one in weights._tensors.values())
    forced = cases["qwen3_moe"].computed._tensors
    assert isinstance(forced["model.layers.1.mlp.experts.gate_up_proj"], WeightConversion)


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral", "gpt2", "wav2vec2", "fused", "bin"])
def test_any_slice_is_read_exactly(kind: str, cases: dict[str, Case]) -> None:
    case = cases[kind]

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(case.state)))
        tensor = case.state[name]
        shard_slice = data.draw(shard_slices(tuple(tensor.shape)))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
        wanted = elements_of(tensor, shard_slice).to(dtype)
        for weights in (case.weights, case.computed):
            target = torch.full((len(shard_slice) + 2,), 7, dtype=dtype)
            weights.fill(name, shard_slice, target[1:-1])
            assert torch.equal(target[1:-1], wanted), (name, shard_slice)
            assert target[0] == target[-1] == 7

    check()


@pytest.mark.parametrize("kind", ["qwen3_moe", "fused", "bin"])
@pytest.mark.parametrize("world", [1, 3, 8])
def test_ranks_read_every_byte_once(kind: str, world: int, cases: dict[str, Case]) -> None:
    """Ranges of all ranks, sharded by ZeRO-3: together as many bytes as the tensors have (small gaps aside)."""
    case = cases[kind]
    for name, tensor in case.state.items():
        if isinstance(case.weights._tensors[name], WeightConversion):
            continue
        before = case.weights.bytes_read
        shard_slice = ShardSlice.whole(tensor.shape)
        for rank in range(world):
            shard = shard_slice.part(rank, world)
            case.weights.fill(name, shard, torch.empty(len(shard), dtype=tensor.dtype))
        read = case.weights.bytes_read - before
        transposed = kind == "bin" or name.endswith("o_proj.weight")
        assert read >= tensor.nbytes if transposed and world > 1 else read == tensor.nbytes, name


def test_only_the_expert_rows_of_a_rank_are_read(cases: dict[str, Case]) -> None:
    """Tensor parallelism partitions the rows of each expert: only these bytes are read."""
    case = cases["mixtral"]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    shape = tuple(case.state[name].shape)
    half = shape[1] // 4
    shard_slice = ShardSlice(shape, 0, shape[0] * 2 * half * shape[2], 1, ((0, half), (2 * half, half)))
    before = case.weights.bytes_read
    target = torch.empty(len(shard_slice))
    case.weights.fill(name, shard_slice, target)
    assert torch.equal(target, elements_of(case.state[name], shard_slice))
    assert case.weights.bytes_read - before == len(shard_slice) * 4 == math.prod(shape) * 4 // 2


def test_one_computed_parameter_is_cached(cases: dict[str, Case]) -> None:
    case = cases["fused"]
    first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
    shard_slice = ShardSlice.whole(case.state[first].shape)
    read = []
    for name in (first, first, second, first):
        before = case.weights.bytes_read
        for rank in range(4):
            case.weights.fill(name, shard_slice.part(rank, 4), torch.empty(len(shard_slice) // 4))
        read.append(case.weights.bytes_read - before)
    size = case.state[first].nbytes
    assert read[1:] == [0, size, size]
    assert read[0] in (0, size)


def test_open_weights_traces_elements(tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path)
    weights = open_weights(tmp_path, on_meta(*KINDS["mixtral"]()))
    assert not any(isinstance(one, WeightConversion) for one in weights._tensors.values())
