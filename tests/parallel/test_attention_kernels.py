"""The kernels of one block against attention by its definition in float64, and the contracts of the CUDA operators.

The CPU operator runs for real. Those of CUDA run here only as shapes (meta tensors, through the real signatures) and
against a stand-in that computes by the definition but holds its callers to what the CUDA code asks for; the tests
marked ``gpu`` run the real ones.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.parallel.attention_kernels import (
    BlockInputs,
    CpuFlash,
    CudaFlash,
    Cudnn,
    Efficient,
    Kernel,
    Math,
    kernel_for,
)
from tests.support.attention import dense_attention

CPU = "cpu"
SCALE = 0.3
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
MASKS = ("none", "causal", "mask", "one mask for all", "empty rows")
_aten = torch.ops.aten


class Case:
    """Queries on two blocks of keys: one of the kind asked for, and ``more`` keys that every query sees."""

    def __init__(
        self,
        kind: str,
        dtype: torch.dtype,
        device: str = CPU,
        key_heads: int = 2,
        head_dim: int = 16,
        value_dim: int | None = None,
        more: int = 10,
        queries: int = 21,
    ) -> None:
        torch.manual_seed(0)
        self.causal = kind == "causal"
        keys = queries if self.causal else queries + 14
        widths = (head_dim, head_dim, value_dim or head_dim, value_dim or head_dim)
        lengths = (queries, keys + more, keys + more, queries)
        # Parts of larger tensors, as the tokens of a block are.
        self.query, self.key, self.value, self.grad_out = (
            torch.randn(2, heads, 2 * tokens, width).to(device, dtype)[:, :, tokens:]
            for heads, tokens, width in zip((4, key_heads, key_heads, 4), lengths, widths, strict=True)
        )
        self.mask = None
        self.allowed = torch.ones(2, queries, keys + more, dtype=torch.bool)
        if self.causal:
            self.allowed[:, :, :keys].tril_()
        elif kind != "none":
            mask = torch.rand(1 if kind == "one mask for all" else 2, 1, queries, keys) < 0.5
            mask[..., 0] = True
            if kind == "empty rows":
                mask[0, :, 3] = mask[:, :, 7] = False
            self.allowed[:, :, :keys] = mask[:, 0]
            self.mask = mask.to(device)
        self.blocks = [(slice(0, keys), self.causal, self.mask)]
        if more:
            self.blocks.append((slice(keys, keys + more), False, None))

    def errors(self, kernel: Kernel, unmasked: Kernel | None = None) -> dict[str, float]:
        """Largest difference to the definition of each result, relative to its largest value."""
        leaves = [tensor.detach().double().cpu().requires_grad_() for tensor in (self.query, self.key, self.value)]
        wanted_out, wanted_lse = dense_attention(*leaves, self.allowed, SCALE)
        wanted = torch.autograd.grad(wanted_out, leaves, self.grad_out.double().cpu())
        out_of_all, lse_of_all = wanted_out.detach().to(self.query), wanted_lse.detach().to(self.query.device)
        lse_of_all = lse_of_all.to(torch.float64 if self.query.dtype == torch.float64 else torch.float32)
        # Parts of larger tensors, too.
        out_of_all = torch.nn.functional.pad(out_of_all, (0, 0, 3, 0))[:, :, 3:]
        lse_of_all = lse_of_all.masked_fill(lse_of_all == -math.inf, math.inf)
        lse_of_all = torch.nn.functional.pad(lse_of_all, (3, 0))[:, :, 3:]

        grads = [torch.zeros_like(leaf) for leaf in leaves]
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for number, (columns, causal, mask) in enumerate(self.blocks):
            kernel_of_block = kernel if mask is not None or number == 0 else unmasked or kernel
            key, value = self.key[:, :, columns], self.value[:, :, columns]
            inputs = BlockInputs(self.query, key, value, causal, mask, SCALE)
            out, lse = kernel_of_block.forward(inputs)
            assert (out.dtype, lse.dtype) == (self.query.dtype, lse_of_all.dtype)
            block = [leaf[:, :, columns] if leaf is not leaves[0] else leaf for leaf in leaves]
            block_out, block_lse = dense_attention(*block, self.allowed[:, :, columns], SCALE)
            assert torch.equal(lse.cpu() == -math.inf, block_lse == -math.inf)
            assert not out.cpu()[block_lse == -math.inf].any()
            found[f"out {number}"] = out, block_out
            found[f"lse {number}"] = lse.nan_to_num(neginf=0.0), block_lse.nan_to_num(neginf=0.0)
            parts = kernel_of_block.backward(inputs, self.grad_out, out_of_all, lse_of_all)
            for grad, part, tensor in zip(grads, parts, (self.query, key, value), strict=True):
                assert part.shape == tensor.shape
                (grad if tensor is self.query else grad[:, :, columns]).add_(part.double().cpu())
        found.update(zip(("query", "key", "value"), zip(grads, wanted, strict=True), strict=True))
        return {
            name: float((got.double().cpu() - right.detach()).abs().max() / right.detach().abs().max())
            for name, (got, right) in found.items()
        }


def assert_near(errors: dict[str, float], dtype: torch.dtype) -> None:
    too_large = {name: error for name, error in errors.items() if not error <= TOLERANCE[dtype]}
    assert not too_large, f"further than {TOLERANCE[dtype]}: {too_large}"


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", [CpuFlash(), Math()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_cpu_kernels_match_the_definition(kernel: Kernel, kind: str, dtype: torch.dtype, key_heads: int) -> None:
    """Output, lse, and the gradients of two blocks by the output and lse of both."""
    assert_near(Case(kind, dtype, key_heads=key_heads).errors(kernel), dtype)


@pytest.mark.parametrize("kernel", [CpuFlash(), Math()], ids=lambda kernel: type(kernel).__name__)
def test_queries_without_any_key_give_zero_and_no_gradient(kernel: Kernel) -> None:
    case = Case("empty rows", torch.float64, more=0)
    assert_near(case.errors(kernel), torch.float64)


@pytest.mark.parametrize("kernel", [CpuFlash(), Math()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 8), (8, 16), (5, 3)])
def test_value_heads_may_have_another_width(kernel: Kernel, head_dim: int, value_dim: int) -> None:
    for kind in ("causal", "empty rows"):
        case = Case(kind, torch.float64, head_dim=head_dim, value_dim=value_dim)
        assert_near(case.errors(kernel), torch.float64)


def test_control_the_lse_of_one_block_gives_different_gradients() -> None:
    """Negative control: what backward is given matters."""

    class Forgetful(CpuFlash):
        def backward(self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> Any:
            out, lse = self.forward(inputs)
            return super().backward(inputs, grad_out, out, lse)

    errors = Case("none", torch.float64).errors(Forgetful())
    assert errors["out 0"] < 1e-11 < 1e-2 < errors["query"]


def test_the_kernel_is_chosen_by_dtype_and_mask() -> None:
    for dtype in TOLERANCE:
        tensor, mask = torch.zeros(1, 1, 1, 8, dtype=dtype), torch.ones(1, 1, 1, 1, dtype=torch.bool)
        assert isinstance(kernel_for(BlockInputs(tensor, tensor, tensor, False, None, SCALE)), CpuFlash)
        assert isinstance(kernel_for(BlockInputs(tensor, tensor, tensor, False, mask, SCALE)), CpuFlash)
        elsewhere = tensor.to("meta")
        assert isinstance(kernel_for(BlockInputs(elsewhere, elsewhere, elsewhere, False, mask, SCALE)), Math)


@pytest.mark.parametrize("kernel", [CudaFlash(), Cudnn()], ids=lambda kernel: type(kernel).__name__)
def test_kernels_of_cuda_without_masks_reject_one(kernel: Kernel) -> None:
    tensor = torch.zeros(1, 1, 2, 8, device="meta")
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta")
    inputs = BlockInputs(tensor, tensor, tensor, False, mask, SCALE)
    with pytest.raises(ValueError, match="takes no mask"):
        kernel.forward(inputs)
    with pytest.raises(ValueError, match="takes no mask"):
        kernel.backward(inputs, tensor, tensor, tensor[..., 0])


# -- the operators of CUDA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [(kernel, kind) for kernel in (CudaFlash(), Cudnn()) for kind in MASKS[:2]]
    + [(Efficient(), kind) for kind in MASKS],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_calls_fit_the_signatures_of_cuda_operators(kernel: Kernel, kind: str) -> None:
    case = Case(kind, torch.bfloat16, head_dim=20, value_dim=12)
    mask = None if case.mask is None else case.mask.to("meta")
    columns = case.blocks[0][0]
    query, grad_out = case.query.to("meta"), case.grad_out.to("meta")
    key, value = case.key[:, :, columns].to("meta"), case.value[:, :, columns].to("meta")
    inputs = BlockInputs(query, key, value, case.causal, mask, SCALE)
    out, lse = kernel.forward(inputs)
    assert (out.shape, lse.shape) == (grad_out.shape, query.shape[:3])
    grads = kernel.backward(inputs, grad_out, out, lse)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


class StandIn(TorchDispatchMode):
    """Computes what the CUDA operators compute, by :class:`Math`, and refuses what they refuse or would misread."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _aten._scaled_dot_product_efficient_attention.default:
            return self.efficient(*args, **kwargs)
        if function is _aten._scaled_dot_product_efficient_attention_backward.default:
            return self.efficient_backward(*args, **kwargs)
        if function is _aten._scaled_dot_product_flash_attention.default:
            return self.flash(*args, **kwargs)
        if function is _aten._scaled_dot_product_flash_attention_backward.default:
            return self.flash_backward(*args, **kwargs)
        return function(*args, **kwargs)

    # Arguments that have their default do not arrive here.

    @staticmethod
    def check(*inputs: Tensor) -> None:
        for tensor in inputs:
            assert tensor.stride(3) == 1
            assert tensor.shape[3] % 8 == 0
            assert tensor.stride(2) % 8 == 0

    def check_bias(self, bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        if bias is None:
            return None
        assert bias.dtype == query.dtype
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.stride(3) == 1
        assert all(stride % 16 == 0 for stride in bias.stride()[:3])
        return bias[:, :1] == 0

    def efficient(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Any,
        with_lse: bool,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float,
    ) -> tuple[Tensor, ...]:
        self.check(query, key, value)
        assert query.shape[1] == key.shape[1] == value.shape[1]
        assert with_lse and dropout == 0
        mask = self.check_bias(bias, query, key)
        out, lse = Math().forward(BlockInputs(query, key, value, causal, mask, scale))
        if mask is not None:
            out = out.masked_fill(~mask.any(-1, keepdim=True), math.nan)
        padding = -lse.shape[-1] % 32
        return out, torch.nn.functional.pad(lse, (0, padding), value=math.nan), torch.zeros(()), torch.zeros(())

    def efficient_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Any,
        out: Tensor,
        lse: Tensor,
        seed: Tensor,
        offset: Tensor,
        dropout: float,
        wanted: list[bool],
        causal: bool = False,
        *,
        scale: float,
    ) -> tuple[Tensor | None, ...]:
        self.check(grad_out, query, key, value, out)
        assert dropout == 0 and wanted == [True, True, True, False]
        assert seed.dtype == offset.dtype == torch.int64
        assert all(stride % 8 == 0 for stride in lse.stride()[:2]) and lse.stride(2) == 1
        assert bool((lse[..., query.shape[2] :] == math.inf).all())
        # How the kernel finds the rows of `out`: two strides are given, that of tokens is assumed.
        shape, strides = list(out.shape), list(out.stride())
        out = out.as_strided(shape, [strides[0], strides[1], out.shape[1] * out.shape[3], 1])
        mask = self.check_bias(bias, query, key)
        grads = Math().backward(
            BlockInputs(query, key, value, causal, mask, scale), grad_out, out, lse[..., : query.shape[2]]
        )
        return *grads, None

    def flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float = 0.0,
        causal: bool = False,
        debug: bool = False,
        *,
        scale: float,
    ) -> tuple[Any, ...]:
        self.check(query, key, value)
        assert query.shape[3] == key.shape[3] == value.shape[3]
        assert dropout == 0 and not debug
        nothing = torch.zeros(())
        return (
            *Math().forward(BlockInputs(query, key, value, causal, None, scale)),
            None,
            None,
            0,
            0,
            nothing,
            nothing,
            nothing,
        )

    def flash_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        cum_q: Any,
        cum_k: Any,
        max_q: int,
        max_k: int,
        dropout: float,
        causal: bool,
        seed: Tensor,
        offset: Tensor,
        scale: float,
    ) -> tuple[Tensor, ...]:
        self.check(grad_out, query, key, value, out)
        assert cum_q is None and cum_k is None and dropout == 0
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        assert seed.dtype == offset.dtype == torch.uint64
        lse = lse.as_strided(lse.shape, [lse.shape[1] * lse.shape[2], lse.shape[2], 1])  # read as if contiguous
        return Math().backward(BlockInputs(query, key, value, causal, None, scale), grad_out, out, lse)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (20, 12)])
def test_calls_keep_the_contracts_of_cuda_operators(kind: str, key_heads: int, head_dim: int, value_dim: int) -> None:
    case = Case(kind, torch.float64, key_heads=key_heads, head_dim=head_dim, value_dim=value_dim)
    with StandIn():
        assert_near(case.errors(Efficient(), CudaFlash()), torch.float64)
        if case.mask is None:
            assert_near(case.errors(CudaFlash()), torch.float64)


def test_queries_without_any_key_on_cuda() -> None:
    with StandIn():
        assert_near(Case("empty rows", torch.float64, more=0).errors(Efficient()), torch.float64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (20, 12)])
def test_cuda_kernels_match_the_definition(kind: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    case = Case(kind, dtype, "cuda", head_dim=head_dim, value_dim=value_dim)
    alone = BlockInputs(case.query, case.key, case.value, False, None, SCALE)
    unmasked = kernel_for(alone)
    kernel = unmasked if case.mask is None else kernel_for(alone._replace(mask=case.mask))
    assert isinstance(unmasked, Efficient if dtype == torch.float32 else CudaFlash)
    assert_near(case.errors(kernel, unmasked), dtype)
    assert_near(case.errors(Math()), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", MASKS[:2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (96, 64), (20, 12)])
@pytest.mark.parametrize("tokens", [64, 333])
def test_cudnn_matches_the_definition(
    kind: str, dtype: torch.dtype, head_dim: int, value_dim: int, tokens: int
) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's kernel is used since Hopper")
    case = Case(kind, dtype, "cuda", head_dim=head_dim, value_dim=value_dim, queries=tokens, more=tokens)
    inputs = BlockInputs(case.query, case.key[:, :, :tokens], case.value[:, :, :tokens], case.causal, None, SCALE)
    assert isinstance(kernel_for(inputs), Cudnn if head_dim % 8 == 0 else CudaFlash)
    assert_near(case.errors(Cudnn()), dtype)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert isinstance(kernel_for(inputs), CudaFlash)
