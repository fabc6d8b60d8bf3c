"""Weights that callbacks and overridden methods write, freeze and read: as in transformers' Trainer at one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ds_trainer import ConfigError
from ds_trainer.utils import distributed
from tests.support.compare import relative, weight_distance
from tests.support.pool import pool
from tests.support.runs import whole_weights
from tests.training.test_own_steps import Classifier, rows

STEPS = 6


class Events:
    """A callback of either library; ``trainer`` is set before the training."""

    trainer: Any = None


class Pruned(Events):
    """A mask that is written into the weight after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        with torch.no_grad():
            model.first.weight.mul_((torch.arange(24).view(6, 4) % 3 > 0).to(model.first.weight))


class Clipped(Events):
    """Weight clipping, through ``data``."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class Set(Events):
    """A tensor that takes the place of the weight's, as ``prune.remove`` and averaging do."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5 + 0.25


class Reinitialized(Events):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        if state.global_step == 3:
            model.second.weight.data.copy_(torch.linspace(-1, 1, 12).view(2, 6))
            nn.init.zeros_(model.second.bias)


class Loaded(Events):
    """The weights of an earlier step come back."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        if state.global_step == 2:
            self.kept = {name: value.clone() for name, value in model.state_dict().items()}
        if state.global_step == 4:
            model.load_state_dict(self.kept)


class Averaged(Events):
    """An average of the weights, which are swapped with it around evaluations, and at the end."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
        )

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        self.average.update_parameters(model)
        if state.global_step in (2, 4):
            kept = [p.detach().clone() for p in model.parameters()]
            self.write(model, self.average.module.parameters())
            self.trainer.evaluate()
            self.write(model, kept)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        self.write(model, self.average.module.parameters())

    @staticmethod
    def write(model: Any, values: Any) -> None:
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.data.copy_(value.data)


class Frozen(Events):
    """Frozen at the beginning, later trained, later frozen again."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        model.first.requires_grad_(False)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        if state.global_step in (2, 4):
            model.first.requires_grad_(state.global_step == 2)


class Rates(Events):
    """Settings of the optimizer."""

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **ignored: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (state.global_step + 1)
            group["weight_decay"] = 0.1


class PrunedByTorch(Events):
    """``torch.nn.utils.prune`` makes the weight a product in each forward pass, and later permanent."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        if state.global_step == 2:
            prune.l1_unstructured(model.first, "weight", amount=0.4)
        if state.global_step == 4:
            prune.remove(model.first, "weight")


CASES: dict[str, Any] = {
    cls.__name__: cls for cls in (Pruned, Clipped, Set, Reinitialized, Loaded, Averaged, Frozen, Rates, PrunedByTorch)
}


def trained(library: Any, events: Any, output_dir: str, **changes: Any) -> Any:
    values: dict[str, Any] = dict(
        max_steps=STEPS,
        optim="sgd",
        learning_rate=0.3,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        train_sampling_strategy="sequential",
    )
    callback = type("Own", (events, library.TrainerCallback), {})()
    args = library.TrainingArguments(output_dir, **{**values, **changes})
    data = rows(64)
    trainer = library.Trainer(Classifier(), args, train_dataset=data, eval_dataset=data[:8], callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]


def theirs(case: str, output_dir: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    import transformers

    trainer = trained(transformers, CASES[case], output_dir)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, losses(trainer)


def ours(
    case: str, output_dir: str, stages: tuple[int, ...], world: int, changes: dict[str, Any] | None = None
) -> dict[int, Any]:
    import ds_trainer

    found: dict[int, Any] = {}
    for stage in stages:
        sizes = {"zero_stage": stage, "per_device_train_batch_size": 4 // world, **(changes or {})}
        try:
            trainer = trained(ds_trainer, CASES[case], output_dir, **sizes)
        except ConfigError as error:
            found[stage] = str(error)
            continue
        found[stage] = whole_weights(trainer), losses(trainer)
        trainer.engine.close()
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_what_a_callback_writes_stays(case: str, tmp_path: Any) -> None:
    wanted, wanted_losses = pool(1).run(theirs, case, str(tmp_path / "theirs"))[0]
    for world in (1, 2):
        for stage, found in pool(world).run(ours, case, str(tmp_path / "ours"), (0, 1, 2, 3), world)[0].items():
            if case == "Averaged" and stage == 3:  # the average is made before DeepSpeed gathers small weights
                assert "ZeRO 3 has only a part of each weight" in found
                continue
            assert not isinstance(found, str), (world, stage, found)
            assert weight_distance(found[0], wanted) < 1e-5, (world, stage)
            assert relative(found[1], wanted_losses) < 1e-4, (world, stage)


LARGE = {"deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}}
"""ZeRO 3 releases all weights, as it does those of more than 100,000 elements by default."""


def test_weights_that_zero_3_has_released_are_not_used(tmp_path: Any) -> None:
    for case in CASES:
        found = pool(2).run(ours, case, str(tmp_path / "ours"), (3,), 2, LARGE)[0][3]
        if case in ("Frozen", "Rates"):
            wanted = pool(1).run(theirs, case, str(tmp_path / "theirs"))[0]
            assert weight_distance(found[0], wanted[0]) < 1e-5, case
        else:
            assert "ZeRO 3 has only a part of each weight" in found, case


class Fixed(Events):
    """New values, which the following updates must not change: their rate is 0."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        if state.global_step == 2:
            self.write(list(model.parameters()))
        if state.global_step >= 2:
            for group in keywords["optimizer"].param_groups:
                group["lr"] = 0.0

    def write(self, parameters: Any) -> None:
        for parameter in parameters:
            parameter.data.fill_(0.375)


class Gathered(Fixed):
    def write(self, parameters: Any) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            super().write(parameters)


def fixed(output_dir: str, events: Any, cases: list[dict[str, Any]]) -> list[bool]:
    """Whether the weights of a run, and of one that resumes from a checkpoint of the step in which they were written,
    are those of the script.
    """
    import ds_trainer

    found = []
    for number, case in enumerate(cases):
        values = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2, **case}
        trainer = trained(ds_trainer, events, f"{output_dir}/{number}", **values)
        found.append(all((value == 0.375).all() for value in whole_weights(trainer).values()))
        trainer.engine.close()
        resumed = ds_trainer.Trainer(Classifier(), trainer.args, train_dataset=rows(64), callbacks=[Still()])
        resumed.train(resume_from_checkpoint=f"{output_dir}/{number}/checkpoint-2")
        found.append(all((value == 0.375).all() for value in whole_weights(resumed).values()))
        resumed.engine.close()
    return found


class Still(Events):
    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        for group in keywords["optimizer"].param_groups:
            group["lr"] = 0.0


OFFLOADED = {"offload_optimizer": "cpu", "deepspeed": {"zero_force_ds_cpu_optimizer": False}}


@pytest.mark.extended
def test_masters_follow_weights_that_were_written(tmp_path: Any) -> None:
    cases = [{"zero_stage": stage, "bf16": bf16} for stage in (0, 1, 2, 3) for bf16 in (False, True)]
    cases += [{"zero_stage": stage, "bf16": True, **OFFLOADED} for stage in (2, 3)]
    assert all(pool(2).run(fixed, str(tmp_path / "written"), Fixed, cases)[0])
    cases = [{**LARGE, "bf16": bf16} for bf16 in (False, True)]
    assert all(pool(2).run(fixed, str(tmp_path / "gathered"), Gathered, cases)[0])


class Unfrozen(Events):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        model.first.requires_grad_(True)


class MoreGroups(Events):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        keywords["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def refused(output_dir: str, events: Any, freeze: bool, stage: int) -> str:
    import ds_trainer

    model = Classifier()
    model.first.requires_grad_(not freeze)
    trainer = ds_trainer.Trainer(
        model,
        ds_trainer.TrainingArguments(
            output_dir, max_steps=3, use_cpu=True, disable_tqdm=True, optim="sgd", zero_stage=stage
        ),
        train_dataset=rows(64),
        callbacks=[events()],
    )
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    finally:
        trainer.engine.close()
    return ""


def test_what_the_optimizer_does_not_have_is_not_trained_without_a_word(tmp_path: Any) -> None:
    for stage in (0, 2):
        (text, _) = pool(2).run(refused, str(tmp_path / f"{stage}"), Unfrozen, True, stage)
        assert "first.weight was unfrozen" in text
        (text, _) = pool(2).run(refused, str(tmp_path / f"{stage}"), MoreGroups, False, stage)
        assert "added a parameter group" in text


class WritesStateDict:
    """As scripts write files of their own; ``should_save`` is that of the main process."""

    def save_model(self: Any, output_dir: Any = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            torch.save(self.model.state_dict(), f"{self.args.output_dir}/own.bin")


class WritesWhole:
    def save_model(self: Any, output_dir: Any = None, _internal_call: bool = False) -> None:
        state = self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            torch.save(state, f"{self.args.output_dir}/own.bin")


class WritesGiven:
    def _save(self: Any, output_dir: Any = None, state_dict: Any = None) -> None:
        torch.save(state_dict or self.model.state_dict(), f"{self.args.output_dir}/own.bin")


class OfCallback:
    pass


class InCallback(Events):
    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        weights = model.state_dict()
        if state.is_world_process_zero:
            torch.save(weights, f"{args.output_dir}/own.bin")


def written(output_dir: str, saves: Any, settings: list[dict[str, Any]]) -> list[str]:
    """What a script writes: "equal" to the weights, "other", or the message of a refusal."""
    import ds_trainer

    found = []
    for number, setting in enumerate(settings):
        directory = f"{output_dir}/{number}"
        values = {"max_steps": 2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", **setting}
        callbacks = [type("Own", (InCallback, ds_trainer.TrainerCallback), {})()] if saves is OfCallback else []
        args = ds_trainer.TrainingArguments(directory, **values)
        trainer = type("Own", (saves, ds_trainer.Trainer), {})(
            Classifier(), args, train_dataset=rows(16), callbacks=callbacks
        )
        text = ""
        try:
            trainer.train()
            trainer.save_model()
        except ConfigError as error:
            text = str(error)
        if any(distributed.gather_objects(text)):
            found.append(text)
        else:
            distributed.barrier()
            wanted, own = whole_weights(trainer), torch.load(f"{directory}/own.bin")
            same = all(own[name].shape == value.shape and (own[name] == value).all() for name, value in wanted.items())
            found.append("equal" if same else "other")
        trainer.engine.close()
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("saves", [WritesStateDict, WritesWhole, WritesGiven, OfCallback])
def test_a_script_writes_no_empty_file(saves: Any, tmp_path: Any) -> None:
    (*lower, small, large) = pool(2).run(
        written, str(tmp_path), saves, [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 3}, LARGE]
    )[0]
    assert lower == ["equal", "equal"] and small == "equal"
    if saves in (WritesStateDict, OfCallback):
        assert "ZeRO 3 has only a part of each weight" in large
    else:
        assert large == "equal"
