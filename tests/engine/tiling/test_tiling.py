"""Tiled MLPs and norms give the numbers of plain ones; what mixes tokens is found and left out."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.engine.tiling import per_token
from ds_trainer.engine.tiling.per_token import remove_tiling, tile_modules
from ds_trainer.engine.tiling.tiled_forward import TiledForward, tiled_forward
from ds_trainer.training.model.gradient_checkpointing import enable_gradient_checkpointing
from tests.support.compare import weight_distance

CPU = torch.device("cpu")
_TEXT: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)


def of(name: str, task: str = "ForCausalLM", **values: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, f"{name}{task}")(getattr(transformers, f"{name}Config")(**values))
        return model

    return make


def with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(MODELS["Llama"](), LoraConfig(r=2, target_modules=["gate_proj", "down_proj", "q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first: nothing would be learned of A
            nn.init.normal_(parameter, std=0.02)
    return model


_GPT2 = dict(vocab_size=61, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
_T5 = dict(
    vocab_size=61, d_model=16, d_kv=4, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": of("Llama", **_TEXT),
    "Gemma 2": of("Gemma2", head_dim=4, **_TEXT),
    "Qwen 3": of("Qwen3", head_dim=4, **_TEXT),
    "Phi-3": of("Phi3", **_TEXT),
    "GPT-2": of("GPT2", "LMHeadModel", **_GPT2),
    "GPT-NeoX": of("GPTNeoX", **_TEXT),
    "T5": of("T5", "ForConditionalGeneration", **_T5),
    "Llama with LoRA": with_lora,
}
MLPS = {"T5": 4}


def results(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a batch of 60 tokens, and all gradients."""
    tokens = torch.randint(3, 61, (3, 20), generator=torch.Generator().manual_seed(0))
    model.train()
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_plain_model(name: str) -> None:
    model = MODELS[name]()
    wanted_loss, wanted = results(copy.deepcopy(model))
    tiling = tile_modules(model, CPU)
    assert len(tiling.mlps) == MLPS.get(name, 2) and not tiling.left_out, tiling
    loss, found = results(model)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert found.keys() == wanted.keys() and weight_distance(found, wanted) < 2e-6
    before = list(dict(model.named_parameters()))
    remove_tiling(model)
    assert before == list(dict(model.named_parameters()))
    assert not any("forward" in vars(module) for module in model.modules())


def mlp_of(model: nn.Module) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith(".mlp"))


def test_control_a_lost_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a token is lost."""
    plain = per_token.TiledForward.__call__

    def shortened(self: TiledForward, x: torch.Tensor) -> Any:
        out = plain(self, x).clone()
        out[:, 5] = 0
        return out

    _, wanted = results(MODELS["Llama"]())
    model = MODELS["Llama"]()
    tile_modules(model, CPU)
    monkeypatch.setattr(TiledForward, "__call__", shortened)
    _, found = results(model)
    assert weight_distance(found, wanted) > 1e-3
    assert "other tokens" in tile_modules(MODELS["Llama"](), CPU).left_out["model.layers.0.mlp"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_inside_activation_checkpointing(reentrant: bool) -> None:
    _, wanted = results(MODELS["Llama"]())
    model: Any = MODELS["Llama"]()
    enable_gradient_checkpointing(model, {"use_reentrant": reentrant})
    tile_modules(model, CPU)
    _, found = results(model)
    assert weight_distance(found, wanted) < 2e-6


class ByHand(nn.Module):
    """The reference for dropout: tiles one after the other, with autograd's own record."""

    def __init__(self, module: nn.Module, rows: int) -> None:
        super().__init__()
        self.module, self.rows = module, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(1, -1, x.shape[-1])
        return torch.cat([self.module(part) for part in tokens.split(self.rows, dim=1)], dim=1).view(x.shape)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_dropout_draws_the_same_numbers_again(
    checkpointing: bool, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU tiles even draw the numbers of the plain step. Broken, the generators are not set back."""

    def make() -> Any:
        model: Any = of("GPT2", "LMHeadModel", **{**_GPT2, "resid_pdrop": 0.3})()
        if checkpointing:
            enable_gradient_checkpointing(model, {"use_reentrant": False})
        return model

    if broken:
        monkeypatch.setattr("ds_trainer.engine.tiling.tiled_forward._set_generators", lambda *_: None)
    tiled, by_hand, plain = make(), make(), make()
    assert len(tile_modules(tiled, CPU).mlps) == 2
    for layer in by_hand.transformer.h:
        layer.mlp = ByHand(layer.mlp, 16)
    found, wanted, other = [], [], []
    for model, record in ((tiled, found), (by_hand, wanted), (plain, other)):
        torch.manual_seed(1)
        record += list(results(model)[1].values())
        record.append(torch.rand(1))  # the generator continues from the same place
    for reference in (wanted, other):
        differences = [float((a - b).norm() / b.norm()) for a, b in zip(found, reference, strict=True)]
        assert max(differences) > 1e-2 if broken else max(differences) < 2e-6


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_states_of_generators_are_kept_only_for_dropout(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass in training mode finds out; a rate that is changed later is seen too."""
    read: list[int] = []
    module = sys.modules[TiledForward.__module__]
    state = module._generator_state
    monkeypatch.setattr(module, "_generator_state", lambda device: (read.append(1), state(device))[1])
    model: Any = of("GPT2", "LMHeadModel", **{**_GPT2, "resid_pdrop": dropout})()
    tile_modules(model, CPU)
    results(model)
    read.clear()
    results(model)
    assert bool(read) is bool(dropout)
    for layer in model.transformer.h:
        layer.mlp.dropout.p = 0.3
    results(model)
    assert read


def test_each_gradient_arrives_once() -> None:
    """What waits for a gradient (ZeRO) sees one per backward pass, of all tiles."""
    model = MODELS["Llama"]()
    tile_modules(model, CPU)
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    results(model)
    assert sorted(arrived) == sorted(name for name, _ in model.named_parameters())


def test_frozen_weights_and_inputs() -> None:
    mlp = mlp_of(MODELS["Llama"]())
    mlp.up_proj.requires_grad_(False)
    wanted = copy.deepcopy(mlp)
    TiledForward(mlp, rows=4)
    for needs in (False, True):
        x = torch.randn(2, 11, 16, requires_grad=needs)
        y = x.detach().clone().requires_grad_(needs)
        mlp(x).square().sum().backward()
        wanted(y).square().sum().backward()
        if needs:
            torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(mlp.gate_proj.weight.grad, wanted.gate_proj.weight.grad)
    assert mlp.up_proj.weight.grad is None
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), wanted(x))


@pytest.mark.parametrize("autocast", [False, True])
def test_sixteen_bits(autocast: bool) -> None:
    """Tiles are added in float32: the sum is as near to float32's as that of the plain MLP."""
    exact = mlp_of(MODELS["Llama"]())
    x = torch.randn(1, 256, 16)
    exact(x).square().sum().backward()
    errors = []
    for tiled in (False, True):
        mlp = copy.deepcopy(exact).zero_grad() or copy.deepcopy(exact)
        mlp.zero_grad()
        mlp = mlp if autocast else mlp.to(torch.bfloat16)
        if tiled:
            TiledForward(mlp, rows=4)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = mlp(x if autocast else x.to(torch.bfloat16))
            assert out.dtype is torch.bfloat16
            out.float().square().sum().backward()
        assert mlp.up_proj.weight.grad.dtype is mlp.up_proj.weight.dtype
        errors.append(float((mlp.up_proj.weight.grad - exact.up_proj.weight.grad).norm()))
    assert errors[1] < 1.5 * errors[0]


def test_memory_of_a_tile_not_of_the_sequence() -> None:
    from benchmarks.live_tensors import LiveTensors

    peaks = []
    for tiled in (False, True):
        mlp = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32))
        if tiled:
            TiledForward(mlp, rows=32)
        x = torch.randn(1, 4096, 32, requires_grad=True)
        with LiveTensors() as live:
            mlp(x).sum().backward()
        peaks.append(live.peak)
    assert peaks[1] < peaks[0] / 8, peaks


# -- what is found ----------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Looks like an MLP; subtracts the mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).relu())
        return y - y.mean(dim=1, keepdim=True)


class Normalized(Mixing):
    """Mixes tokens by its statistics, only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).relu())
        z: torch.Tensor = self.norm(y.transpose(1, 2)).transpose(1, 2)
        return z


@pytest.mark.parametrize("kind", [Mixing, Normalized])
def test_a_module_that_mixes_tokens_is_left_out_by_name(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"good": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), "bad": kind()})
    tiling = tile_modules(model, CPU)
    assert tiling.mlps == ["good"]
    assert tiling.left_out == {"bad": "its result for a token depends on other tokens"}
    assert tiled_forward(model["bad"]) is None


def test_mixtures_of_experts_are_left_out() -> None:
    model = of("Mixtral", num_local_experts=4, **_TEXT)()
    assert tile_modules(model, CPU).mlps == []


def test_nothing_of_the_model_is_read_or_drawn() -> None:
    """Weights may be on the meta device, and the verification draws no number of the run."""
    with torch.device("meta"):
        model = MODELS["Llama"]()
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    tiling = tile_modules(model, CPU)
    assert len(tiling.mlps) == 2 and len(tiling.norms) == 5
    assert torch.equal(torch.rand(1), wanted)
    assert all(parameter.is_meta for parameter in model.parameters())
