"""``self`` belongs to the script: a subclass may keep any attribute and add any method, as with transformers' Trainer.

The names are all that occur in our own training code, and those that scripts usually take. Each is assigned in several
ways, many at once; the losses must be those of a Trainer without them. A failure is halved until single names are left.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ds_trainer
from ds_trainer import ConfigError, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from ds_trainer.training.distillation_trainer import DistillationTrainer
from ds_trainer.training.protocol import ASSEMBLY, TrainerProtocol
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

OFFERED = {"engine", "layout", "tokenizer", "save_checkpoint", "unwrap_model_for_generation"}
"""Public names that transformers' Trainer does not have. A subclass may use them for something else, too."""
OLDER = {"_nested_gather", "_pad_across_processes", "_gather_and_numpify"}
"""Methods of transformers 4, for scripts that call them: the Trainer does not."""
USUAL = """
losses device output_dir stats layout groups events engine config logger history metrics teacher ema beta processor
inputs run step _run _step _engine _losses _metrics _config _logger _device tokenizer reward_model ref_model student
alpha temperature loss_fn criterion scaler writer wandb best patience global_step epoch batch batch_size data
dataset train_loader sampler seed rng rank world_size dtype task classes class_weights generate collate preprocess
prepare setup start stop close reset update forward backward save load restore configure build make plan check
refresh release fit test validate callbacks hooks plugins memory cache queue lock timer clock profiler trials
publisher telemetry estimator packing evaluator assembly trainer machinery core
"""


def hf_names() -> set[str]:
    """What transformers' Trainer has: its members, and what its methods set on it."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(transformers.Trainer)))  # type: ignore[arg-type]
    written = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_written(node)}
    return written | set(dir(transformers.Trainer)) | set(dir(transformers.Seq2SeqTrainer))


def _is_written(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


@cache
def names() -> tuple[str, ...]:
    """Every attribute, method and function in our training code, and the usual ones, without those of transformers."""
    found = {*re.findall(r"\w+", USUAL), *OFFERED}
    for path in (Path(ds_trainer.__file__).parent / "training").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    found = {name for name in found if not name.startswith("__")} - {ASSEMBLY, "_ds_assembly"}
    return tuple(sorted(found - hf_names()))


class Taken:
    """What a script keeps: useless for anything else."""

    def __init__(self, *args: Any) -> None:
        self.called = 0

    def __bool__(self) -> bool:
        raise TypeError("this is the script's")

    __len__ = __iter__ = __eq__ = __bool__  # type: ignore[assignment]
    __hash__ = object.__hash__


def before(base: type, taken: tuple[str, ...]) -> type:
    class Own(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            self._all_that_the_script_keeps = {name: Taken() for name in taken}
            for name, value in self._all_that_the_script_keeps.items():
                setattr(self, name, value)
            super().__init__(*args, **keywords)

    return Own


def after(base: type, taken: tuple[str, ...]) -> type:
    class Own(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self._all_that_the_script_keeps = {name: Taken() for name in taken}
            for name, value in self._all_that_the_script_keeps.items():
                setattr(self, name, value)

    return Own


def of_the_class(make: Callable[[], Any], base: type, taken: tuple[str, ...]) -> type:
    return type("Own", (base,), {name: make() for name in taken})


def method() -> Any:
    def own(self: Any, *args: Any, **keywords: Any) -> Any:
        raise AssertionError("called by the Trainer")

    return own


WAYS: dict[str, Callable[[type, tuple[str, ...]], type]] = {
    "before the constructor": before,
    "after the constructor": after,
    "class attributes": partial(of_the_class, Taken),
    "methods": partial(of_the_class, method),
    "properties": partial(of_the_class, lambda: property(method())),
}


def trained(folder: Path | str, kind: type, base: type = Trainer, **changes: Any) -> list[Any]:
    """Losses and metrics of a training with evaluations and saves, an evaluation and a prediction."""
    values: dict[str, Any] = dict(
        max_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=1, save_steps=1, save_total_limit=1
    )
    values |= dict(disable_tqdm=True, use_cpu=True, report_to="none", per_device_train_batch_size=2)
    args = Seq2SeqTrainingArguments(str(folder), **{**values, **changes})
    torch.manual_seed(0)
    data, options = RaggedTokens(8), {}
    if base is DistillationTrainer:
        options["teacher"] = tiny_llama()
    trainer = kind(tiny_llama(), args, train_dataset=data, eval_dataset=data, **options)
    trainer.train()
    found = [trainer.evaluate(), trainer.predict(data).metrics, *trainer.state.log_history]
    if base is Trainer and kind is not Trainer and (kept := vars(trainer).get("_all_that_the_script_keeps")):
        assert all(vars(trainer)[name] is value for name, value in kept.items())  # nobody has replaced them
    trainer._ds_trainer.engines.close()
    return [{k: v for k, v in log.items() if "loss" in k or "norm" in k} for log in found]


def collisions(way: str, run: Callable[[type], Any], base: type = Trainer) -> dict[str, str]:
    """The names that change or end a run, and how."""
    wanted = run(base)

    def among(taken: tuple[str, ...]) -> dict[str, str]:
        try:
            problem = "" if run(WAYS[way](base, taken)) == wanted else "other losses"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not problem or len(taken) == 1:
            return {name: problem for name in taken if problem}
        half = len(taken) // 2
        return {**among(taken[:half]), **among(taken[half:])}

    return among(names() if base is Trainer else tuple(name for name in names() if name != "teacher"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_script_may_take_any_name(way: str, tmp_path: Path) -> None:
    assert len(names()) > 800
    assert collisions(way, partial(trained, tmp_path)) == {}


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["after the constructor", "methods"])
@pytest.mark.parametrize("kind", [Seq2SeqTrainer, DistillationTrainer])
def test_so_does_a_script_for_the_other_trainers(kind: type, way: str, tmp_path: Path) -> None:
    run = partial(trained, tmp_path, base=kind, predict_with_generate=kind is Seq2SeqTrainer, generation_max_length=20)
    assert collisions(way, run, kind) == {}


def on_two_ranks(folder: str, way: str, **values: Any) -> dict[str, str]:
    return collisions(way, partial(trained, folder, **values))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "values",
    [
        {"zero_stage": 3},
        {"context_parallel_size": 2, "loss_chunk_tokens": 16},
        {"packing": True, "max_length": 32, "auto_find_batch_size": True, "skip_memory_metrics": False},
    ],
    ids=["ZeRO-3", "sharded sequences", "packed"],
)
def test_so_does_a_script_on_several_ranks(values: dict[str, Any], tmp_path: Path) -> None:
    assert pool(2).run(partial(on_two_ranks, str(tmp_path), "after the constructor", **values)) == [{}, {}]


def test_few_public_names_are_added(tmp_path: Path) -> None:
    """Before, while and after a Trainer is used; only as many as the page says."""
    seen: set[str] = set()

    class Looks(Trainer):
        def log(self, *args: Any, **keywords: Any) -> None:
            seen.update(dir(self))
            super().log(*args, **keywords)

    args = Seq2SeqTrainingArguments(str(tmp_path), max_steps=1, logging_steps=1, use_cpu=True, disable_tqdm=True)
    trainer = Looks(tiny_llama(), args, train_dataset=RaggedTokens(8), eval_dataset=RaggedTokens(8))
    for use in (trainer.train, trainer.evaluate, partial(trainer.predict, RaggedTokens(8))):
        seen.update(dir(trainer))
        use()
    seen.update(dir(trainer))
    added = seen - hf_names()
    assert {name for name in added if not name.startswith("_")} == OFFERED
    assert {name for name in added if not name.startswith("__")} - OFFERED == {ASSEMBLY, "_ds_assembly", *OLDER}
    page = (Path(ds_trainer.__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [name for name in OFFERED if f"`{name}`" not in page] == []


class Slots(Trainer):
    __slots__ = ("device", "layout", "losses")

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.losses: list[int] = []
        super().__init__(*args, **keywords)
        self.device = self.layout = "the script's"


class Delegates(Trainer):
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **keywords: None


class Records(Trainer):
    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).setdefault("written", []).append(name)
        super().__setattr__(name, value)

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "__dict__").setdefault("read", []).append(name)
        return object.__getattribute__(self, name)


class IsModule(Trainer, torch.nn.Module):
    """Its model is a submodule."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        torch.nn.Module.__init__(self)
        Trainer.__init__(self, *args, **keywords)


class Answers:
    def __getattr__(self, name: str) -> Any:
        return [] if name == "losses" else getattr(super(), name)


class Behind(Trainer, Answers):
    def log(self, *args: Any, **keywords: Any) -> None:
        assert self.losses == []
        super().log(*args, **keywords)


class Before(Answers):
    def __init__(self, *args: Any, alpha: float = 0.5, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.engines = self.alpha = alpha


Ahead = type("Ahead", (Before, Trainer), {})


@dataclass(eq=False, init=False)
class OfData(Trainer):
    losses: list[float] = field(default_factory=list)

    @cached_property
    def engine(self) -> str:
        return "the script's"

    @property
    def args(self) -> Any:
        return super().args

    @args.setter
    def args(self, value: Any) -> None:
        Trainer.args.__set__(self, value)


@pytest.mark.parametrize("kind", [Slots, Delegates, Records, IsModule, Behind, Ahead, OfData])
def test_a_script_may_be_any_kind_of_class(kind: type, tmp_path: Path) -> None:
    assert trained(tmp_path, kind) == trained(tmp_path, Trainer)


@pytest.mark.parametrize("name", ["args", "state"])
def test_a_property_with_another_object_is_one_error(name: str, tmp_path: Path) -> None:
    own = property(lambda self: self._own, lambda self, value: setattr(self, "_own", value))
    with pytest.raises(ConfigError, match=rf"Own\.{name} is a property .* Return super\(\)\.{name} in it"):
        type("Own", (Trainer,), {name: own})(tiny_llama(), arguments(tmp_path), train_dataset=RaggedTokens(8))


# -- names that are taken ----------------------------------------------------------------------------------------------

METHODS = [name for name, kind in TrainerProtocol.__annotations__.items() if kind == "Method"]


def arguments(folder: Path) -> Any:
    return Seq2SeqTrainingArguments(str(folder), max_steps=1, use_cpu=True, disable_tqdm=True, report_to="none")


def test_the_protocol_has_all_methods_that_the_trainer_calls() -> None:
    """A method that one of ours calls on ``self`` ends a run if a script has put something else there."""
    called: set[str] = set()
    folder = Path(ds_trainer.__file__).parent / "training"
    for path in (*(folder / "overrides").glob("*.py"), *folder.glob("*trainer.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = node.func if isinstance(node, ast.Call) else None
            owner = function.value if isinstance(function, ast.Attribute) else None
            if isinstance(owner, ast.Name) and owner.id in ("self", "trainer"):
                called.add(function.attr)  # type: ignore[union-attr]
    methods = {name for name in called if callable(getattr(Trainer, name, None)) and not name.startswith("_ds")}
    assert len(methods) > 20
    assert methods - OLDER <= set(METHODS)
    assert [name for name in METHODS if not callable(getattr(Trainer, name, None))] == []


@pytest.mark.parametrize("way", ["before the constructor", "class attributes"])
def test_a_method_that_is_something_else_is_one_error(way: str, tmp_path: Path) -> None:
    Own = WAYS[way](Trainer, tuple(METHODS))
    with pytest.raises(ConfigError) as caught:
        Own(tiny_llama(), arguments(tmp_path), train_dataset=RaggedTokens(8))
    assert len(caught.value.problems) == len(METHODS)
    owner = "Own" if way == "class attributes" else r"self (a before.<locals>.Own)"
    wanted = f"{owner}.log is a Taken, but log is a method that the Trainer calls. Give it another name."
    assert wanted in caught.value.problems


@pytest.mark.parametrize("use", ["train", "evaluate", "predict"])
def test_a_method_that_is_replaced_later_is_an_error_too(use: str, tmp_path: Path) -> None:
    trainer = Trainer(tiny_llama(), arguments(tmp_path), train_dataset=RaggedTokens(8), eval_dataset=RaggedTokens(8))
    trainer.evaluation_loop = []  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"\.evaluation_loop is a list, but evaluation_loop is a method"):
        getattr(trainer, use)(*([RaggedTokens(8)] if use == "predict" else []))


def test_an_attribute_that_cannot_be_set_is_an_error(tmp_path: Path) -> None:
    class Own(Trainer):
        model = property(lambda self: None)  # type: ignore[assignment]
        state = "mine"  # type: ignore[assignment]

        def args(self) -> None: ...  # type: ignore[override]

    with pytest.raises(ConfigError) as caught:
        Own(tiny_llama(), arguments(tmp_path))
    about = "test_an_attribute_that_cannot_be_set_is_an_error.<locals>.Own"
    assert caught.value.problems == [
        f"{about}.args is a function, but the Trainer keeps its own args there. Give it another name.",
        f"{about}.state is a str, but the Trainer keeps its own state there. Give it another name.",
        f"{about}.model is a property without a setter, but the Trainer sets model. Give it another name.",
    ]


def test_attributes_of_the_reference_may_be_set_around_the_constructor(tmp_path: Path) -> None:
    """transformers' constructor replaces what was set before; what is set later is used."""

    class Own(Trainer):
        def __init__(self, model: Any, args: Any, **keywords: Any) -> None:
            self.args, self.state, self.control, self.callback_handler = args, None, None, None  # type: ignore[assignment]
            self.model, self.model_accepts_loss_kwargs, self.optimizer_cls_and_kwargs = model, False, None
            self.neftune_noise_alpha = self.current_gradient_accumulation_steps = 3
            assert self.args is args and self.current_gradient_accumulation_steps == 3
            super().__init__(model, args, compute_metrics=self.compute_metrics, **keywords)
            self.current_gradient_accumulation_steps = 1
            self.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 0.125})
            self.deepspeed = self.hub_model_id = self.current_flos = self.objective = self._train_batch_size = "mine"

        def compute_metrics(self, prediction: Any) -> dict[str, float]:
            return {"counted": float(len(prediction.predictions))}

    own_args = arguments(tmp_path)
    trainer = Own(tiny_llama(), own_args, train_dataset=RaggedTokens(8), eval_dataset=RaggedTokens(8))
    assert trainer.args is own_args and trainer.state is not None and trainer.model_accepts_loss_kwargs is True
    trainer.train()
    assert type(trainer.engine.basic_optimizer) is torch.optim.SGD and trainer.deepspeed == "mine"
    assert trainer.evaluate()["eval_counted"] == 8.0
    trainer.engine.close()


def test_a_copy_calls_its_own_methods(tmp_path: Path) -> None:
    import copy

    class Own(Trainer):
        steps = 0

        def training_step(self, *args: Any, **keywords: Any) -> Any:
            self.steps += 1
            return super().training_step(*args, **keywords)

    first = Own(tiny_llama(), arguments(tmp_path), train_dataset=RaggedTokens(8))
    for other in (copy.copy(first), copy.deepcopy(first)):
        other.train()
        assert (first.steps, other.steps) == (0, 1)
        other.engine.close()
