"""Optimizers of libraries: class and arguments are those that transformers' Trainer would take."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.arguments.enums import OptimizerNames
from ds_trainer.config.library_optimizer_table import LIBRARY
from ds_trainer.config.optimizer_block import OF_NAME
from ds_trainer.optim.library_optimizer_builder import (
    build_given_optimizer,
    build_library_optimizer,
    library_class,
    optimizer_class_and_arguments,
)
from ds_trainer.optim.optimizer_builder import decay_parameter_names, parameter_groups
from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled
from tests.support.models import Regression, regression_rows, tiny_llama

OF_DEEPSPEED = {"lion_32bit", "lamb", "muon"}
REFUSED = {"adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision", "lomo", "adalomo"}
REFUSED |= {str(name) for name in OptimizerNames if str(name).endswith("_layerwise")}
# More than one case for a name: with optim_args.
OPTIM_ARGS: dict[str, list[str]] = {
    "sgd": ["momentum=0.9,nesterov=True"],
    "adagrad": ["lr_decay=0.1,eps=1e-8"],
    "rmsprop": ["momentum=0.5,alpha=0.9,centered=True"],
    "rmsprop_bnb": ["alpha=0.9"],
    "ademamix": ["beta1=0.8,beta2=0.99,beta3=0.999,alpha=2.0,eps=1e-6,t_alpha=10,t_beta3=20"],
    "galore_adamw": ["rank=4,update_proj_gap=3,scale=0.5,proj_type=reverse_std"],
    "apollo_adamw": ["rank=4,proj=svd,scale_type=tensor,scale=8.0"],
    "grokadamw": ["alpha_init=0.9,lamb=1.0,gamma=0.2,grokking_signal_decay_rate=0.2,gradient_clipping=0.5"],
    "schedule_free_adamw": ["r=0.5,weight_lr_power=1.0"],
    "stable_adamw": ["max_lr=0.1,kahan_sum=True,decouple_lr=True"],
}
CASES = [
    (str(name), text)
    for name in OptimizerNames
    if str(name) not in OF_DEEPSPEED | REFUSED
    for text in ("", *OPTIM_ARGS.get(str(name), []))
]
BETAS = {"learning_rate": 0.01, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "warmup_steps": 3}


def installed(name: str) -> None:
    row = LIBRARY.get(OptimizerNames(name))
    if row is not None and importlib.util.find_spec(row.cls.partition(".")[0].partition(":")[0]) is None:
        pytest.skip(f"{row.package} is not installed")


def modules(name: str) -> dict[str, Any]:
    row = LIBRARY.get(OptimizerNames(name))
    return {"optim_target_modules": ["q_proj", ".*mlp.*down.*"]} if row is not None and row.low_rank else {}


def arguments(name: str, text: str = "", **changes: Any) -> TrainingArguments:
    given = {**BETAS, **modules(name), **changes}
    return TrainingArguments("out", use_cpu=True, optim=name, optim_args=text or None, **given)


def test_every_name_is_built_by_somebody() -> None:
    library = {str(name) for name in LIBRARY}
    own = {str(name) for name in OF_NAME}
    assert library | own | REFUSED == {str(name) for name in OptimizerNames}
    assert not library & own and not (library | own) & REFUSED


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_optimizers_are_rejected_with_a_message(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"optim={name} .*Use "):
        TrainingArguments("out", optim=name)


def plain(value: Any) -> Any:
    """Parameters by identity, so that groups can be compared."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return id(value) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("name", "text"), CASES)
def test_class_and_arguments_are_those_of_transformers(name: str, text: str, tmp_path: Path) -> None:
    import transformers

    installed(name)
    model = tiny_llama()
    reference = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, optim=name, optim_args=text or None, **BETAS, **modules(name)
    )
    cls, wanted = transformers.Trainer.get_optimizer_cls_and_kwargs(reference, model)  # type: ignore[arg-type]
    found_cls, found = Trainer.get_optimizer_cls_and_kwargs(arguments(name, text), model)
    if name in ("rmsprop_bnb",) and text:  # the reference hands words on, which the library cannot calculate with
        wanted = {key: float(value) if isinstance(value, str) else value for key, value in wanted.items()}
    assert found_cls is cls
    assert plain(found) == plain(wanted)
    assert text == "" or found != Trainer.get_optimizer_cls_and_kwargs(arguments(name), model)[1]


def test_what_deepspeed_builds_has_no_class() -> None:
    for name in OF_DEEPSPEED:
        with pytest.raises(ConfigError, match=rf"optim={name} \(argument\): DeepSpeed builds it"):
            optimizer_class_and_arguments(arguments(name))


def test_low_rank_needs_the_model() -> None:
    installed("galore_adamw")
    with pytest.raises(ConfigError, match="pass the model, too"):
        optimizer_class_and_arguments(arguments("galore_adamw"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("adafactor", "beta1=0.9", "'beta1' is not an argument of optim=adafactor. It takes none"),
        ("grokadamw", "lam=2", "Did you mean 'lamb'.* Valid names: alpha_init"),
        ("grokadamw", "lamb=much", "lamb of optim=grokadamw: expected float, got 'much'"),
        ("galore_adamw", "rank=1.5", "rank of optim=galore_adamw: expected int, got 1.5"),
    ],
)
def test_wrong_optim_args(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compiled(optim=name, optim_args=text, **modules(name))


@pytest.mark.parametrize("name", sorted(str(name) for name in LIBRARY))
def test_the_configuration_has_no_optimizer_block(name: str) -> None:
    config = compiled(optim=name, world=2, device="cuda", **modules(name))
    assert "optimizer" not in config and config.get("zero_allow_untested_optimizer") is True
    assert config.get("zero_optimization.stage") == (0 if LIBRARY[OptimizerNames(name)].stage_0_only else 1)


def test_two_optimizers() -> None:
    with pytest.raises(ConfigError, match=r"has an optimizer, but optim=adafactor \(argument\). Keep one"):
        compiled(optim="adafactor", deepspeed={"optimizer": {"type": "AdamW"}})


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw"])
def test_matrices_have_their_own_group(name: str) -> None:
    installed(name)
    model = tiny_llama()
    args = arguments(name, "rank=4", weight_decay=0.1)
    groups = parameter_groups(model, decay_parameter_names(model), args.weight_decay)
    one = build_library_optimizer(args, LIBRARY[OptimizerNames(name)], model, groups)
    seen = [(group.get("rank"), group["weight_decay"], len(group["params"])) for group in one.param_groups]
    total = sum(len(group["params"]) for group in groups)
    assert [entry[:2] for entry in seen] == [(None, 0.1), (None, 0.0), (4, 0.1)]
    assert seen[2][2] == 4 and sum(entry[2] for entry in seen) == total
    chosen = {id(p) for p in one.param_groups[2]["params"]}
    names = {key for key, p in model.named_parameters() if id(p) in chosen}
    assert all("q_proj" in key or "down_proj" in key for key in names)


@pytest.mark.parametrize(
    ("modules_given", "message"),
    [
        (
            "nothing",
            "'nothing' .* matches no linear layer of the model. Linear layers: model.layers.0.self_attn.q_proj",
        ),
        ("(", "is not a regular expression"),
    ],
)
def test_missing_modules_are_reported(modules_given: str, message: str) -> None:
    installed("galore_adamw")
    with pytest.raises(ConfigError, match=message):
        optimizer_class_and_arguments(arguments("galore_adamw", optim_target_modules=modules_given), tiny_llama())


@pytest.mark.parametrize("modules_given", ["all-linear", "all_linear", r".*q_proj"])
def test_modules_given_by_one_name(modules_given: str) -> None:
    installed("galore_adamw")
    model = tiny_llama()
    _, found = optimizer_class_and_arguments(arguments("galore_adamw", optim_target_modules=modules_given), model)
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert len(found["params"][1]["params"]) == (linear if modules_given.startswith("all") else 2)


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "grokadamw", None)
    with pytest.raises(ConfigError, match=r"optim=grokadamw \(argument\) needs grokadamw.*pip install grokadamw"):
        library_class(arguments("grokadamw"), LIBRARY[OptimizerNames.GROKADAMW])


def test_embeddings_keep_32_bits() -> None:
    installed("adamw_8bit")
    model = tiny_llama(vocab_size=1024)
    args = arguments("adamw_8bit")
    groups = parameter_groups(model, decay_parameter_names(model), 0.0)
    one = build_library_optimizer(args, LIBRARY[OptimizerNames.ADAMW_8BIT], model, groups)
    model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    one.step()
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    assert embedding.weight.numel() >= 4096  # the library quantises nothing smaller
    assert one.state[embedding.weight]["state1"].dtype == torch.float32
    head: Any = model.lm_head
    assert one.state[head.weight]["state1"].dtype == torch.uint8


def test_moments_of_grokadamw_are_saved(tmp_path: Path) -> None:
    """The library keeps them where torch's state_dict does not look."""
    installed("grokadamw")
    row = LIBRARY[OptimizerNames.GROKADAMW]

    def make() -> tuple[Regression, torch.optim.Optimizer]:
        model = Regression()
        args = arguments("grokadamw")
        return model, build_library_optimizer(args, row, model, [{"params": list(model.parameters())}])

    def steps(model: Regression, one: torch.optim.Optimizer, first: int, last: int) -> None:
        for sample in regression_rows(10)[first:last]:
            one.zero_grad()
            model(sample["x"][None], sample["labels"][None])[0].backward()
            one.step()

    model, one = make()
    steps(model, one, 0, 5)
    torch.save({"model": model.state_dict(), "optimizer": one.state_dict()}, tmp_path / "saved.pt")
    steps(model, one, 5, 10)
    restored, other = make()
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    restored.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    steps(restored, other, 5, 10)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), restored.parameters(), strict=True))


class Factory:
    """What makes an optimizer of a whole model."""

    def __call__(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr)


def test_an_optimizer_class_may_be_given() -> None:
    model = Regression()
    groups = parameter_groups(model, decay_parameter_names(model), 0.25)
    one = build_given_optimizer(torch.optim.AdamW, {"lr": 0.5, "betas": (0.5, 0.6)}, model, groups)
    assert [(group["lr"], group["weight_decay"]) for group in one.param_groups] == [(0.5, 0.25), (0.5, 0.0)]
    first = [next(model.parameters())]
    assert len(build_given_optimizer(torch.optim.SGD, {"lr": 0.5, "params": first}, model, groups).param_groups) == 1
    assert isinstance(build_given_optimizer(Factory, {"lr": 0.5}, model, groups), torch.optim.SGD)


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (torch.optim.SGD, {"rate": 0.1}, r"torch.optim.sgd.SGD rejects the arguments \{'rate': 0.1\}"),
        (torch.optim.SGD, {"lr": -1.0}, "Invalid learning rate"),
        (Factory, {"rate": 0.1}, "rejects the arguments"),
        (dict, {}, "its instances are not callable"),
        ("SGD", {}, "'SGD' is neither an optimizer class nor a factory class"),
    ],
)
def test_an_unusable_optimizer_class_is_rejected(cls: Any, given: dict[str, Any], message: str) -> None:
    model = Regression()
    with pytest.raises(ConfigError, match=message):
        build_given_optimizer(cls, given, model, [{"params": list(model.parameters())}])
