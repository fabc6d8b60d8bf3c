"""LoRA on divided experts and beside them: loss, norm and all weights are those of plain PyTorch and PEFT.

With SGD and active clipping, as in tests/training/test_expert_parallel.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine.expert_parallel import mark_experts
from ds_trainer.training.model import expert_division
from ds_trainer.training.model.expert_division import expert_problems
from tests.support.compare import assert_equal, distances, weight_distance
from tests.support.expert_models import mixture
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import compatibility_of, train_and_report
from tests.training.test_expert_parallel import BATCH, RATE, STEPS, samples

peft = pytest.importorskip("peft")

CLIP = 0.005
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "experts": {"target_modules": [], "target_parameters": STACKED},
    "one of the weights": {"target_modules": [], "target_parameters": STACKED[1:]},
    "both": {"target_modules": ["q_proj", "v_proj"], "target_parameters": STACKED},
    "dense": {"target_modules": ["q_proj", "v_proj"]},
    "whole copies": {"target_modules": ["q_proj"], "modules_to_save": ["experts"]},
}


class Adapted(NamedTuple):
    """Makes a mixture with LoRA whose factors are not zero; can be sent to a rank."""

    family: str
    targets: str

    def __call__(self) -> Any:
        model = mixture(self.family)
        torch.manual_seed(2)
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=12, **TARGETS[self.targets]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        return model


class Case(NamedTuple):
    """One run."""

    ranks: int
    experts: int
    stage: int
    targets: str = "experts"
    family: str = "qwen3_moe"
    changes: dict[str, Any] = {}  # noqa: RUF012

    @property
    def name(self) -> str:
        """For pytest."""
        return "-".join([self.family, self.targets, f"{self.ranks}ranks-ep{self.experts}-zero{self.stage}"])


_oracles: dict[Adapted, Trajectory] = {}


def oracle(make: Adapted) -> Trajectory:
    if make not in _oracles:
        values: dict[str, Any] = dict(optimizer="sgd", learning_rate=RATE, weight_decay=0.0, clip=CLIP)
        _oracles[make] = train_plainly(make(), samples(), global_batch=BATCH, steps=STEPS, **values)
        assert min(_oracles[make].grad_norms) > CLIP
    return _oracles[make]


def contiguous(parameter: Any, groups: Any, dim: int = 0, repeats: int = 1) -> None:
    """As if the factor B had all columns of an expert together."""
    mark_experts(parameter, groups, dim)


def _train(make: Adapted, directory: str, arguments: dict[str, Any], wrong: bool = False) -> Trajectory:
    with mock.patch.object(expert_division, "mark_experts", contiguous) if wrong else nullcontext():
        return train_and_report(make, samples, directory, **arguments)


def trained(case: Case, directory: Any, wrong: bool = False) -> Trajectory:
    zero = {"stage": case.stage, "stage3_param_persistence_threshold": 0}
    arguments: dict[str, Any] = dict(
        expert_parallel_size=case.experts,
        per_device_train_batch_size=BATCH // case.ranks // case.changes.get("gradient_accumulation_steps", 1),
        max_steps=STEPS,
        optim="sgd",
        learning_rate=RATE,
        weight_decay=0.0,
        max_grad_norm=CLIP,
        self_test="never",
        **({"deepspeed": {"zero_optimization": zero}} if case.stage == 3 else {"zero_stage": case.stage}),
        **case.changes,
    )
    reports = pool(case.ranks).run(_train, Adapted(case.family, case.targets), str(directory), arguments, wrong)
    for report in reports[1:]:
        assert_equal(report, reports[0], 1e-6)
    return reports[0]


DEFAULT = [Case(2, 2, 1, "both"), Case(2, 2, 3)]
MORE = [
    Case(2, 2, 0),
    Case(2, 2, 2, "dense"),
    Case(2, 2, 1, "whole copies"),
    Case(2, 2, 3, "whole copies"),
    Case(2, 2, 3, "dense"),
    Case(2, 2, 0, "dense"),
    Case(4, 2, 2, "both", changes={"gradient_accumulation_steps": 2}),
    Case(4, 2, 3, "one of the weights", changes={"gradient_checkpointing": True}),
    Case(4, 4, 1),  # an expert of each rank, which peft takes for a linear layer
    Case(4, 4, 1, family="gpt_oss"),
    Case(2, 2, 3, "both", family="gpt_oss"),
    Case(2, 2, 1, family="deepseek_v3"),
]


@pytest.mark.parametrize("case", DEFAULT, ids=lambda case: case.name)
def test_numbers_are_those_of_one_process(case: Case, tmp_path: Any) -> None:
    assert_equal(trained(case, tmp_path), oracle(Adapted(case.family, case.targets)), 2e-6)


@pytest.mark.extended
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_other_layouts_families_and_targets(case: Case, tmp_path: Any) -> None:
    assert_equal(trained(case, tmp_path), oracle(Adapted(case.family, case.targets)), 2e-6)


def test_factors_that_are_cut_wrongly_are_noticed(tmp_path: Any) -> None:
    found = distances(trained(DEFAULT[0], tmp_path, wrong=True), oracle(Adapted("qwen3_moe", "both")))
    assert found["losses"] > 1e-5 and found["grad_norms"] > 1e-3


STOP = 2


def _resumed(directory: str, arguments: dict[str, Any], resume: str | None) -> Trajectory:
    values: dict[str, Any] = dict(use_cpu=True, learning_rate=1e-2, adam_epsilon=1e-5, logging_steps=1)
    values |= dict(save_steps=STOP, max_steps=2 * STOP, self_test="never", disable_tqdm=True)
    args = TrainingArguments(directory, **values, **arguments)
    trainer = Trainer(Adapted("qwen3_moe", "both")(), args, train_dataset=samples())
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(Path(directory, "final")))
    report = compatibility_of(trainer)
    trainer.engine.close()
    return report


def test_checkpoints_and_exports_have_all_experts(tmp_path: Path) -> None:
    """Resumed with whole experts, and with other ranks and another stage; peft loads the adapters."""

    def run(ranks: int, experts: int, stage: int, name: str, resume: str | None = None) -> Trajectory:
        arguments = dict(zero_stage=stage, expert_parallel_size=experts, per_device_train_batch_size=BATCH // ranks)
        return pool(ranks).run(partial(_resumed, str(tmp_path / name), arguments, resume))[0]

    wanted = run(2, 2, 1, "first")
    checkpoint = str(tmp_path / "first" / f"checkpoint-{STOP}")
    for ranks, experts, stage in ((2, 1, 3), (4, 4, 2)):
        found = run(ranks, experts, stage, f"{experts}", checkpoint)
        assert found.losses[STOP:] == pytest.approx(wanted.losses[STOP:], rel=1e-6)
        assert weight_distance(found.weights, wanted.weights) <= 1e-6
        loaded = peft.PeftModel.from_pretrained(mixture("qwen3_moe"), tmp_path / f"{experts}" / "final")
        assert weight_distance({name: p.detach() for name, p in loaded.named_parameters()}, found.weights) == 0


def test_adapters_that_cannot_be_divided_are_refused() -> None:
    """A bias of all experts is one matrix for peft."""
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj_bias"])
    (problem,) = expert_problems(peft.get_peft_model(mixture("gpt_oss"), config), 2)
    assert "mlp.experts" in problem and "adapters that cannot be divided" in problem and "target_parameters" in problem


def test_matrices_of_all_experts_are_refused_with_muon() -> None:
    """It makes each matrix orthogonal: a factor of all experts, but each expert of a stacked weight by itself."""
    adapted = Adapted("qwen3_moe", "experts")()
    assert expert_problems(adapted, 2) == expert_problems(Adapted("qwen3_moe", "dense")(), 2, 2, "Muon") == []
    for model in (adapted, mixture("gpt_oss")):
        (problem,) = expert_problems(model, 2, 2, "Muon")
        assert "optim=muon: " in problem and "has matrices with rows of all experts" in problem
    biases = [p.requires_grad_(False) for name, p in model.named_parameters() if "experts" in name and p.dim() == 2]
    assert biases and expert_problems(model, 2, 2, "Muon") == []
