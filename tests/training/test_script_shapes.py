"""Scripts that use weights, gradients and optimizers in further ways: the weights are those of transformers in one
process, or there is one clear error.
"""

from __future__ import annotations

import copy
import shutil
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from ds_trainer import ConfigError
from tests.support.compare import weight_distance
from tests.support.pool import pool
from tests.support.runs import whole_weights
from tests.training.test_own_steps import Classifier, Step, rows

ANY, DIVIDED, LAST = (0, 1, 2, 3), (1, 2, 3), (3,)  # ZeRO stages


class Masked(Classifier):
    """Trains two rows of a matrix only, as for new tokens."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.zeros(6, 1)
        mask[:2] = 1
        self.first.weight.register_hook(lambda gradient: gradient * mask)


class Normalized(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(self.first)


class Spectral(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(self.first)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: Any = None) -> torch.Tensor:
        return self.discriminator(self.generator(x))


class OfMask:
    model = Masked


class OfNorm:
    model = Normalized


class OfSpectralNorm:
    model = Spectral


class Alternates(Step):
    """The discriminator is frozen while the generator gets its gradient."""

    model = Gan

    def passes(self: Any, model: Any, inputs: Any, items: Any) -> Any:
        x, steps, judge = inputs["x"], self.args.gradient_accumulation_steps, self.model.discriminator
        fake = judge(self.model.generator(x).detach())
        self.accelerator.backward((F.softplus(-judge(x)).mean() + F.softplus(fake).mean()) / steps)
        judge.requires_grad_(False)
        loss = F.softplus(-model(x)).mean() / steps
        self.accelerator.backward(loss)
        judge.requires_grad_(True)
        return loss.detach()


class ReturnsNothing(Step):
    """transformers fails, too: isnan() of None."""

    refused: ClassVar = (ANY, "training_step returned None")
    alone = True

    def passes(self: Any, model: Any, inputs: Any, items: Any) -> None:
        self.accelerator.backward(model(**inputs)["loss"])


class Penalty:
    refused: ClassVar = (LAST, "ZeRO 3 has only a part of each weight")

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        outputs = model(**inputs)
        weights = sum(parameter.pow(2).sum() for name, parameter in model.named_parameters() if "weight" in name)
        loss = outputs["loss"] + 0.01 * weights
        return (loss, outputs) if return_outputs else loss


class LatePenalty(Penalty):
    """After the steps in which the order of the modules is recorded, and small weights released, too."""

    options: ClassVar = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"]
        if self.state.global_step >= 3:
            loss = loss + 0.1 * self.model.first.weight.pow(2).sum()
        return (loss, outputs) if return_outputs else loss


class Anchor(Penalty):
    """The distance to the weights before the training."""

    def __init__(self: Any, model: nn.Module, *given: Any, **keywords: Any) -> None:
        super().__init__(model, *given, **keywords)  # type: ignore[call-arg]
        self.anchor = self.model.first.weight.detach().clone()

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] + (self.accelerator.unwrap_model(model).first.weight - self.anchor).pow(2).sum()
        return (loss, outputs) if return_outputs else loss


class Teacher(Penalty):
    """A copy of what ``compute_loss`` gets, made in the first call."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        if not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(model).requires_grad_(False)
        outputs = model(**inputs)
        loss = outputs["loss"] + F.mse_loss(outputs["logits"], self.teacher(**inputs)["logits"])
        return (loss, outputs) if return_outputs else loss


class Lars(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


class OwnOptimizer:
    refused: ClassVar = (DIVIDED, "depends on whole tensors")

    def create_optimizer(self: Any, *given: Any) -> Any:
        self.optimizer = Lars(self.model.parameters(), lr=0.1)
        return self.optimizer


class HalvesGradients:
    refused: ClassVar = (DIVIDED, "A callback uses parameter.grad (first.weight)")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class HalvesWholeGradients:
    """As the error says; at stage 0 as in transformers."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        for parameter in model.parameters():
            if getattr(args, "zero_stage", 0):
                safe_set_full_grad(parameter, 0.5 * safe_get_full_grad(parameter))
            else:
                parameter.grad.mul_(0.5)


class Prunes:
    """In the first steps, which are looked at."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        if state.global_step == 1:
            prune.l1_unstructured(model.first, "weight", amount=0.5)


class Freezes:
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        model.first.requires_grad_(state.global_step < 1)


class Ties:
    alone = True  # transformers trains on, without the weight
    refused: ClassVar = (ANY, "A script has replaced, removed or added second.bias")

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        if state.global_step == 1:
            model.second.bias = nn.Parameter(torch.zeros(2))


class Replaces(Ties):
    refused: ClassVar = (ANY, "A script has replaced, removed or added second.weight")

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        if state.global_step == 1:
            model.second = nn.Linear(6, 2)


class Adds(Ties):
    refused: ClassVar = (ANY, "A script has replaced, removed or added extra.weight")

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        if state.global_step == 1:
            model.extra = nn.Linear(6, 2)


class Clips:
    alone = True
    refused: ClassVar = (ANY, "A script has set max_grad_norm=0.05 while the model trains")

    def on_step_begin(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        args.max_grad_norm = 0.05


class Accumulates(Clips):
    refused: ClassVar = (ANY, "A script has set gradient_accumulation_steps=2 while the model trains")

    def on_step_end(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        args.gradient_accumulation_steps = 2

    on_step_begin = on_step_end


class Swaps(Step):
    """A new optimizer after a step, as when layers are unfrozen."""

    alone = True
    refused: ClassVar = (ANY, "A script has replaced trainer.optimizer while the model trains")

    def passes(self: Any, model: Any, inputs: Any, items: Any) -> Any:
        if self.state.global_step == 1:
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        loss = self.compute_loss(model, inputs) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class ResetsMoments:
    """As ReLoRA does after merging."""

    refused: ClassVar = (DIVIDED, "A script looks for parameters in the optimizer (optimizer.state of first.weight)")

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        for parameter in given["model"].parameters():
            for value in given["optimizer"].state.get(parameter, {}).values():
                value.zero_()


class ResetsGroups:
    refused: ClassVar = (LAST, "A script looks for parameters in the optimizer (in param_groups, whose lists are")

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **ignored: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for value in optimizer.state[parameter].values():
                    value.mul_(0.5)


class Counting(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, **ignored: Any) -> dict[str, torch.Tensor]:
        return super().forward(x, labels)


class CountsItself:
    """The samples of its own micro-batches, not of those of other ranks."""

    model = Counting

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        return batches, torch.tensor(sum(len(batch["x"]) for batch in batches))

    def compute_loss(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None, **ignored: Any) -> Any:
        return F.cross_entropy(model(**inputs)["logits"], inputs["labels"], reduction="sum") / num_items_in_batch


class CountsNothing(CountsItself):
    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        return super().get_batch_samples(epoch_iterator, num_batches, device)[0], None

    def compute_loss(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None, **ignored: Any) -> Any:
        return model(**inputs)["loss"]


class CountsOther(CountsNothing):
    """A number that its loss, a mean, does not use."""

    model = Classifier

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        return super().get_batch_samples(epoch_iterator, num_batches, device)[0], torch.tensor(100)


class EmptyGroups:
    """As LoRA+ makes them; each group has its own schedule."""

    def create_optimizer(self: Any, *given: Any) -> Any:
        first, second = self.model.first.parameters(), self.model.second.parameters()
        groups = [{"params": list(first), "lr": 0.1}, {"params": [], "lr": 9.0}, {"params": list(second), "lr": 0.3}]
        self.optimizer = torch.optim.SGD(groups)
        return self.optimizer

    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        rates = [lambda step: 1 / (1 + step), lambda step: 0.0, lambda step: 0.5**step]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rates)
        return self.lr_scheduler


class Pickles:
    """Parameters of the model, as scripts save what they have trained."""

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        torch.save(dict(model.named_parameters()), f"{args.output_dir}/own{state.is_world_process_zero}.bin")
        read = torch.load(f"{args.output_dir}/own{state.is_world_process_zero}.bin", weights_only=False)
        assert all(type(value) is nn.Parameter and value.numel() for value in read.values())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(2 * read[name])


SHAPES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(OfMask, OfNorm, OfSpectralNorm, Alternates, ReturnsNothing, Penalty, Anchor, LatePenalty, Teacher),
        *(OwnOptimizer, HalvesGradients, HalvesWholeGradients, Prunes, Freezes, Ties, Replaces, Adds, Clips, Pickles),
        *(Accumulates, Swaps, ResetsMoments, ResetsGroups, CountsItself, CountsNothing, CountsOther),
        EmptyGroups,
    )
}


def trained(library: Any, shape: Any, output_dir: str, accumulation: int, **changes: Any) -> Any:
    values: dict[str, Any] = dict(max_steps=4, optim="sgd", learning_rate=0.3, max_grad_norm=0.0, logging_steps=1)
    values |= dict(lr_scheduler_type="constant", per_device_train_batch_size=4, report_to="none", use_cpu=True)
    values |= dict(disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential")
    args = library.TrainingArguments(output_dir, gradient_accumulation_steps=accumulation, **{**values, **changes})
    of_callback = any(name.startswith("on_") for name in dir(shape))
    cls = library.Trainer if of_callback else type("Own", (shape, library.Trainer), {})
    callbacks = [type("Own", (shape, library.TrainerCallback), {})()] if of_callback else []
    model = getattr(shape, "model", Classifier)()
    trainer = cls(model, args, train_dataset=rows(4 * 4 * accumulation), callbacks=callbacks)
    trainer.train()
    return trainer


def theirs(shape: Any, output_dir: str, accumulation: int) -> dict[str, torch.Tensor]:
    import transformers

    trainer = trained(transformers, shape, output_dir, accumulation)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def ours(shape: Any, output_dir: str, accumulation: int, world: int, stage: int) -> Any:
    import ds_trainer

    shutil.rmtree(output_dir, ignore_errors=True)
    sizes: dict[str, Any] = {"per_device_train_batch_size": 4 // world, "zero_stage": stage}
    if stage == 3 and hasattr(shape, "options"):
        sizes["deepspeed"] = shape.options
    try:
        trainer = trained(ds_trainer, shape, output_dir, accumulation, **sizes)
    except ConfigError as error:
        return str(error)
    weights = whole_weights(trainer)
    trainer.engine.close()
    return weights


@pytest.mark.cases(9, rest="extended")
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_weights_are_those_of_one_process_or_the_shape_is_refused(
    shape: str, accumulation: int, tmp_path: Any
) -> None:
    compare(SHAPES[shape], accumulation, tmp_path)


def compare(shape: Any, accumulation: int, tmp_path: Any) -> None:
    """The weights in each layout with those of transformers in one process, or the error that ``shape`` names."""
    stages, text = getattr(shape, "refused", ((), ""))
    own = hasattr(shape, "alone")
    wanted = None if own else pool(1).run(theirs, shape, str(tmp_path / "theirs"), accumulation)[0]
    for world, stage in ((1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)):
        (found, *_) = pool(world).run(ours, shape, str(tmp_path / f"{world}{stage}"), accumulation, world, stage)
        if stage in stages:
            assert isinstance(found, str) and text in found, (world, stage, found)
        else:
            assert not isinstance(found, str) and weight_distance(found, wanted) < 1e-5, (world, stage, found)
