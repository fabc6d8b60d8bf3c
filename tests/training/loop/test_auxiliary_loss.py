"""A router's auxiliary loss counts once: the mean of the micro-batches' own terms, weighted with their items."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections import Counter
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.auxiliary_loss import adds_auxiliary_loss, shows_auxiliary_loss, with_unmasked_tokens
from ds_trainer.training.loop.loss_computation import LossMethod
from ds_trainer.training.loop.loss_rule import loss_in
from ds_trainer.training.loop.router_balance import RouterBalance
from ds_trainer.training.model.label_smoothing import label_smoother
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal, distances
from tests.support.experts import COEFFICIENT, FAMILIES, OwnExperts, long_data, mixtral, step_loss, weighted_means
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, stack, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

SAMPLES, GLOBAL_BATCH = 32, 16
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0}

FOUR = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "zero_stage": 2}  # on two ranks

make_data = partial(RaggedTokens, SAMPLES)


def equal(micro: int, samples: int) -> list[int]:
    return [micro] * (samples // micro)


@cache
def reference(family: str, micro: int) -> Trajectory:
    """``micro``: samples of a micro-batch."""
    loss = partial(step_loss, sizes=partial(equal, micro))
    return train_plainly(FAMILIES[family](), make_data(), loss=loss, optimizer="sgd", learning_rate=0.3)


def run(output_dir: Any, world: int, make_model: Any = mixtral, **arguments: Any) -> list[Trajectory]:
    job = partial(train_and_report, make_model, arguments.pop("data", make_data), str(output_dir))
    return pool(world).run(partial(job, arguments.pop("trainer_class", Trainer), **{**SGD, **arguments}))


def sizes(world: int, accumulation: int) -> dict[str, int]:
    micro = GLOBAL_BATCH // (world * accumulation)
    return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}


LAYOUTS_AND_STAGES = [
    (1, 0, 1), (1, 1, 2), (1, 2, 8), (1, 3, 8), (2, 0, 2), (2, 1, 8), (2, 2, 1), (2, 3, 2), (4, 0, 1), (4, 1, 2),
    (4, 2, 2), (4, 3, 1)
]  # fmt: skip


@pytest.mark.cases(2)
@pytest.mark.parametrize(("world", "stage", "accumulation"), LAYOUTS_AND_STAGES)
def test_trajectory_is_that_of_one_process(world: int, stage: int, accumulation: int, tmp_path: Any) -> None:
    """Loss, gradient norm and weights after four steps, at every stage and number of ranks and micro-batches."""
    arguments = {**sizes(world, accumulation), "zero_stage": stage}
    wanted = reference("mixtral", arguments["per_device_train_batch_size"])
    for found in run(tmp_path, world, **arguments):
        assert_equal(found, wanted)


@pytest.mark.extended
@pytest.mark.parametrize(("world", "stage", "accumulation"), [(2, 1, 2), (4, 3, 1)])
def test_divided_experts_are_balanced_in_each_micro_batch(
    world: int, stage: int, accumulation: int, tmp_path: Any
) -> None:
    arguments = {**sizes(world, accumulation), "zero_stage": stage}
    wanted = reference("mixtral", arguments["per_device_train_batch_size"])
    for found in run(tmp_path, world, expert_parallel_size=2, self_test="never", **arguments):
        assert_equal(found, wanted)
    assert distances(wanted, reference("mixtral", 1))["losses"] > 1e-4  # another micro-batch has another term


class TakesTheSum(Trainer):
    """Negative control: what the model returns is taken for a part of a sum, as in transformers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rule = self._ds_trainer.losses.rule
        rule.auxiliary, rule.verified = False, True


def test_control_summed_terms_are_detected(tmp_path: Any) -> None:
    for found in run(tmp_path, 2, trainer_class=TakesTheSum, **FOUR):
        differences = distances(found, reference("mixtral", 2))
        assert min(differences["losses"], differences["grad_norms"], differences["weights"]) > 0.1, differences


class Operations(TorchDispatchMode):
    """Names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("make_model", "more"), [(tiny_llama, 0), (mixtral, 7)])
def test_the_cost_of_the_auxiliary_loss(make_model: Any, more: int, tmp_path: Any) -> None:
    """Nothing for a model without such a loss; else a handful of operations on scalars and labels, and no waiting."""
    model, batch = make_model(), stack([make_data()[index] for index in range(4)])
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True))
    trainer._ds_trainer.losses.rule.verified = True
    items = torch.tensor(99.0)
    with Operations() as plain:
        loss_in(model(**batch, num_items_in_batch=items), model, batch)
    with Operations() as found:
        trainer._ds_trainer.losses.of(LossMethod.of(trainer.compute_loss), model, dict(batch), items)
    extra = Counter(found.names) - Counter(plain.names)
    assert extra.total() <= more, extra
    assert bool(extra) is bool(more)
    assert not any("_local_scalar_dense" in name for name in extra), extra


# -- over ranks: shards of a sequence count together, and with global_router_aux_loss the batches of all replicas ------


def one_process(micro: int, data: Any = long_data, family: str = "mixtral", sizes: Any = equal) -> Trajectory:
    loss = partial(step_loss, sizes=partial(equal, micro) if sizes is equal else sizes)
    return train_plainly(FAMILIES[family](), data(), loss=loss, optimizer="sgd", learning_rate=0.3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("cp", "sp", "dp"), [(2, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)])
def test_sharded_sequences(cp: int, sp: int, dp: int, stage: int, tmp_path: Any) -> None:
    """The term is that of whole sequences; a part that holds nothing but padding counts for nothing."""
    arguments = {"context_parallel_size": cp, "sequence_parallel_size": sp, "zero_stage": stage}
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4 // dp}
    for found in run(tmp_path, dp * cp * sp, data=long_data, **arguments, **batch):
        assert_equal(found, one_process(4))


class OwnStep(Trainer):
    """As scripts copy it from transformers."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


SP, CP, EP = {"sequence_parallel_size": 2}, {"context_parallel_size": 2}, {"expert_parallel_size": 2}


@pytest.mark.cases(2, "mixtral-2-axis2-1")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "axis"), [(2, {}), (4, {}), (2, SP), (2, CP), (2, EP)])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_batches_of_all_ranks(family: str, dp: int, axis: dict[str, int], stage: int, tmp_path: Any) -> None:
    """The term of a micro-batch is that of one process with the micro-batches of all replicas as one."""
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4 // dp, "zero_stage": stage, **axis}
    arguments |= {"self_test": "never", "global_router_aux_loss": True}
    world, kind = 2 * dp if axis in (SP, CP) else dp, OwnStep if stage == 1 else Trainer
    for found in run(tmp_path, world, FAMILIES[family], data=long_data, trainer_class=kind, **arguments):
        assert_equal(found, one_process(4 * dp, family=family))
    assert distances(one_process(4, family=family), one_process(4 * dp, family=family))["weights"] > 1e-4


def test_a_term_of_another_formula_stays_that_of_the_model(caplog: Any) -> None:
    def own(gate_logits: Any, num_experts: int, top_k: int, attention_mask: Any) -> torch.Tensor:
        return torch.tensor(7.0)

    term = partial(RouterBalance._term, gate_logits=(torch.rand(6, 4),), num_experts=4)
    with caplog.at_level("WARNING"):
        balance = RouterBalance([{"load_balancing_loss_func": own}], ParallelLayout(1), everywhere=False)
        assert term(balance) == 7 and "computes another term" in caplog.text
    with pytest.raises(ConfigError, match=r"another term than .* Set global_router_aux_loss=False"):
        term(RouterBalance([{"load_balancing_loss_func": own}], ParallelLayout(1), everywhere=True))


@pytest.mark.parametrize(
    ("make_model", "why"),
    [(tiny_llama, "does not call"), (partial(mixtral, output_router_logits=False), "output_router_logits=False")],
)
def test_a_model_without_such_a_loss_is_refused(make_model: Any, why: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=f"global_router_aux_loss=True, but .* {why}.*Set global_router_aux_loss"):
        Trainer(make_model(), TrainingArguments(str(tmp_path), use_cpu=True, global_router_aux_loss=True))


# -- the two parts, families, ragged batches -------------------------------------------------------------------------


def first_loss(output_dir: Any, world: int, accumulation: int, coefficient: float) -> float:
    arguments = {**sizes(world, accumulation), "zero_stage": 1, "max_steps": 1}
    return run(output_dir, world, partial(mixtral, coefficient), **arguments)[0].losses[0]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 8), (2, 1), (2, 8), (4, 1), (4, 4)])
def test_both_parts_of_the_loss(world: int, accumulation: int, tmp_path: Any) -> None:
    """The cross-entropy is the same in all layouts; the rest is the weighted mean of the micro-batches' terms."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(42)).tolist()[:GLOBAL_BATCH]
    data, model = make_data(), mixtral()
    micro, batches = GLOBAL_BATCH // (world * accumulation), []
    for begin in range(0, GLOBAL_BATCH, micro):
        batches.append(stack([data[index] for index in order[begin : begin + micro]]))
    with torch.no_grad():
        terms = [float(model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).aux_loss) for b in batches]
        cross_entropy = float(model(**stack([data[index] for index in order])).loss)
        cross_entropy -= COEFFICIENT * float(model(**stack([data[index] for index in order])).aux_loss)
    items = [int(b["labels"][:, 1:].ne(-100).sum()) for b in batches]
    wanted = sum(n * term for n, term in zip(items, terms, strict=True)) / sum(items)
    entropy = first_loss(tmp_path, world, accumulation, 0.0)
    assert entropy == pytest.approx(cross_entropy, rel=1e-5)
    auxiliary = first_loss(tmp_path, world, accumulation, COEFFICIENT) - entropy
    assert auxiliary == pytest.approx(COEFFICIENT * wanted, rel=1e-4)  # a difference of two losses 20 times as large
    if micro == 1:
        assert abs(sum(terms) / len(terms) - wanted) > 1e-3  # so that the weights matter


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mixtral"])
def test_families(family: str, tmp_path: Any) -> None:
    for world, accumulation in ((1, 8), (2, 4)):
        for found in run(tmp_path, world, FAMILIES[family], **sizes(world, accumulation), zero_stage=2):
            assert_equal(found, reference(family, 2), 1e-5 if family != "deepseek_v4" else 1e-4)  # weights of 1e-5


RAGGED = {37: [1, 1, 1, 2], 35: [1, 1, 1]}  # micro-batches of the last step of an epoch


def dealt_sizes(samples: int) -> list[int]:
    """Four replicas with two micro-batches of 2 each; of the last 3 samples of an epoch, one of them gets none."""
    return [2] * 8 if samples == GLOBAL_BATCH else RAGGED[samples + 32]


def test_tokens_of_a_dummy_do_not_count_with_those_of_other_ranks(tmp_path: Any) -> None:
    """In the last step of an epoch three of four ranks have a sample."""
    wanted = one_process(0, partial(RaggedTokens, 35), sizes=lambda samples: [samples])
    job = partial(run, tmp_path, 4, data=partial(RaggedTokens, 35), global_router_aux_loss=True)
    for found in job(**sizes(4, 1), zero_stage=2):
        assert_equal(found, wanted)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("samples", "stage"), [(37, 0), (35, 0), (35, 3)])
def test_dummy_and_ragged_batches_count_by_their_items(samples: int, stage: int, tmp_path: Any) -> None:
    data, loss = partial(RaggedTokens, samples), partial(step_loss, sizes=dealt_sizes)
    wanted = train_plainly(mixtral(), data(), loss=loss, optimizer="sgd", learning_rate=0.3)
    for found in run(tmp_path, 4, data=data, **sizes(4, 2), zero_stage=stage):
        assert_equal(found, wanted)


# -- what else a run may have ----------------------------------------------------------------------------------------


def tuples() -> torch.nn.Module:
    """A subclass whose forward names no arguments and whose outputs have no names."""
    from transformers import MixtralForCausalLM

    class Tuples(MixtralForCausalLM):
        loss_type = "ForCausalLM"

        def forward(self, **inputs: Any) -> Any:
            return super().forward(**inputs, return_dict=False)

    model = mixtral()
    model.__class__ = Tuples
    return model


def with_adapters() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(mixtral(), LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]))


def test_outputs_without_names(tmp_path: Any) -> None:
    for found in run(tmp_path, 2, tuples, **FOUR):
        assert_equal(found, reference("mixtral", 2))


def test_adapters(tmp_path: Any) -> None:
    loss = partial(weighted_means, micro=2)
    wanted = train_plainly(with_adapters(), make_data(), loss=loss, optimizer="sgd", learning_rate=0.3)
    for found in run(tmp_path, 2, with_adapters, **FOUR):
        assert_equal(found, wanted)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_recomputation(stage: int, tmp_path: Any) -> None:
    for found in run(tmp_path, 2, activation_checkpointing=True, **{**FOUR, "zero_stage": stage}):
        assert_equal(found, reference("mixtral", 2))


ATTENTION_ALONE = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*self_attn\.(q|k|v)_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
    ],
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world", "stage"), [(2, 0), (4, 2)])
def test_tensor_parallelism(world: int, stage: int, tmp_path: Any) -> None:
    """Ranks with slices of the same computation have the same term, which counts once."""
    arguments = {"tensor_parallel_size": 2, "deepspeed": {"tensor_parallel": {"partition_config": ATTENTION_ALONE}}}
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16 // world, "zero_stage": stage}
    for found in run(tmp_path, world, **arguments, **batch):
        assert_equal(found, reference("mixtral", 2))


def evaluated(output_dir: str, **arguments: Any) -> float:
    args = TrainingArguments(output_dir, use_cpu=True, disable_tqdm=True, **arguments)
    return Trainer(mixtral(), args, eval_dataset=make_data()).evaluate()["eval_loss"]


@pytest.mark.parametrize(("world", "micro", "layout"), [(1, 2, {}), (2, 2, {}), (2, 16, {}), (2, 2, {"sp": 2})])
def test_evaluation_weights_the_terms_of_each_batch(world: int, micro: int, layout: Any, tmp_path: Any) -> None:
    data = make_data()
    with torch.no_grad():
        batch = stack([data[index] for index in range(SAMPLES)])
        wanted = float(step_loss(mixtral(), batch, partial(equal, micro)))
    arguments = {"sequence_parallel_size": layout.get("sp", 1), "per_device_eval_batch_size": micro}
    for found in pool(world).run(partial(evaluated, str(tmp_path), **arguments)):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_every_model_of_transformers_that_adds_such_a_loss_is_known() -> None:
    """Recognized in the source of their forward: a coefficient times something, added to the loss."""
    import transformers

    missed, seen = [], 0
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if not _TERM.search(source):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for kind in vars(module).values():
            own = isinstance(kind, type) and issubclass(kind, torch.nn.Module) and kind.__module__ == module.__name__
            if not own or "forward" not in vars(kind) or not _TERM.search(inspect.getsource(kind.forward)):
                continue
            seen += 1
            model = kind.__new__(kind)
            torch.nn.Module.__init__(model)
            model.config = SimpleNamespace(z_loss_coefficient=0.01) if "z_loss_coefficient" in source else None
            if not adds_auxiliary_loss(model):
                missed.append(kind.__name__)
    assert not missed and seen > 30


_TERM = re.compile(r"loss_coef(ficient)? \* ")


def test_models_that_add_an_auxiliary_loss_are_recognized() -> None:
    assert adds_auxiliary_loss(mixtral())
    assert adds_auxiliary_loss(OwnExperts(False, True))
    assert not adds_auxiliary_loss(OwnExperts(True, None))  # seen in its outputs instead
    assert not adds_auxiliary_loss(tiny_llama())
    term = torch.ones(())
    assert shows_auxiliary_loss({"loss": term, "aux_loss": term})
    assert shows_auxiliary_loss({"loss": term, "encoder_z_loss": term})
    assert not shows_auxiliary_loss({"loss": term, "aux_loss": None})
    assert not shows_auxiliary_loss((term, term))


def test_a_router_gets_no_mask_without_tokens() -> None:
    some, none = torch.tensor([[1, 0], [0, 0]]), torch.zeros(2, 2, dtype=torch.bool)
    assert torch.equal(with_unmasked_tokens({"attention_mask": some})["attention_mask"], some)
    assert with_unmasked_tokens({"attention_mask": none})["attention_mask"].all()
    assert with_unmasked_tokens({"input_ids": some}) == {"input_ids": some}


def test_smoothed_labels_leave_the_term_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ds_trainer").propagate = True
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        label_smoother(mixtral(output_router_logits=False), 0.1, ["labels"])
        assert not caplog.text
        label_smoother(mixtral(), 0.1, ["labels"])
    assert "label_smoothing_factor=0.1" in caplog.text and "without the auxiliary loss" in caplog.text
