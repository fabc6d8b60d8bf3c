"""What shows within 20 steps that a run cannot learn: one warning for each thing, with its place and a remedy.

Looked at: gradients and movement of every trainable tensor, the size of the updates, copies on different ranks, labels
and samples (:mod:`ds_trainer.training.loop.batch_census`), losses, gradient norms and learning rates.

Step 1 has hooks on the trainable tensors, and waits for the device once at its end; later looks (after steps 2, 4, 8
and 16, only if a tensor had no gradient yet, and after the last step) wait too. The other steps keep scalars and count
tensors in host memory. Afterwards nothing is left of it. A resumed run goes on where it was; after step 20 only the
copies on the ranks are compared, once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.checkpoint.weights.adapter_files import saves_adapters
from ds_trainer.data.columns import base_model
from ds_trainer.data.source_ids import source_names
from ds_trainer.engine.weight_movement import StepSize, WeightMovement, broken_ties, different_copies
from ds_trainer.engine.weights import full_numel
from ds_trainer.optim.rate_checks import rate_warnings, schedule_warnings
from ds_trainer.training.loop.batch_census import BatchCensus, SeenSamples
from ds_trainer.training.loop.gradient_arrivals import (
    GradientArrivals,
    grouped,
    groups_in_loss,
    in_words,
)
from ds_trainer.training.loop.item_count import ItemCount
from ds_trainer.training.loop.training_run import TrainingRun
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.plain_attributes import plain_attributes_restored
from ds_trainer.utils.undisturbed import unchanged

if TYPE_CHECKING:
    from ds_trainer.training.loop.loss_computation import LossComputation, LossMethod
    from ds_trainer.training.loop.step import StepMethods

logger = get_logger(__name__)

STEPS = 20
"""Optimizer steps that are looked at, from the first of the run."""
_ALL = 0.9  # of the trainable elements: as good as all
_FEW_CHANGED = 0.25  # of the elements of a tensor: the others are too large for the update
_CLIPPED = 1000.0  # times max_grad_norm
_WORSE_THAN_GUESSING = 2.0  # times the loss of a uniform guess
_FEW = 5  # steps that say something about the loss


class FirstSteps:
    """Looks at the first steps of a training.

    Args:
        run: the training.
        losses: computes losses.
        method: ``compute_loss``; None if the training step computes the loss in another way.
        prepare: moves a batch to the device.
        census: counts labels and samples.
    """

    def __init__(
        self,
        run: TrainingRun,
        losses: LossComputation,
        method: LossMethod | None,
        prepare: Callable[[Any], dict[str, Any]],
        census: BatchCensus,
    ) -> None:
        self._run = run
        self._engine = run.engine
        self._losses = losses
        self._method = method
        self._prepare = prepare
        self._census = census
        self._trainable = {name: one for name, one in run.model.named_parameters() if one.requires_grad}
        self._names = list(self._trainable)
        self._warn_of_rates()
        self._begun = self._done = run.events.state.global_step
        self._last = min(STEPS, run.plan.max_steps)
        self._attempts = 0
        self._arrivals: GradientArrivals | None = None
        self._weights: WeightMovement | None = None
        self._loss_of_steps: list[torch.Tensor] = []
        self._norms: list[Any] = []
        self._rates: list[Any] = []
        self._measures = False
        self._detached: set[str] = set()
        self._missing_before: set[int] = set()  # parameters without a gradient before the last step
        self._sizes: dict[int, list[StepSize]] = {}  # by attempt, counted from 0

    @classmethod
    def of(
        cls,
        run: TrainingRun,
        losses: LossComputation,
        methods: StepMethods,
        overridden: frozenset[str],
        dataset: Any,
    ) -> FirstSteps:
        """For the methods of a step, of which a subclass overrides ``overridden``, and the data of the training."""
        main_input = getattr(run.model, "main_input_name", "input_ids")
        losses.first_samples = SeenSamples(main_input)
        census = BatchCensus(
            label_names=losses.label_names,
            main_input=main_input,
            shifted=losses.rule.count.shifted,
            sources=source_names(dataset),
            samples=len(dataset) if hasattr(dataset, "__len__") else None,
            replicas=run.engine.layout.dp,
            seen=losses.first_samples,
        )
        method = None if "training_step" in overridden else methods.compute_loss
        return cls(run, losses, method, methods.prepare_inputs, census)

    def _warn_of_rates(self) -> None:
        run, trained = self._run, sum(full_numel(one) for one in self._trainable.values())
        parameters = [
            *rate_warnings(run.optimizer, saves_adapters(run.model), trained),
            *schedule_warnings(run.lr_scheduler, run.plan.max_steps),
        ]
        if run.events.state.global_step < STEPS:
            for one in parameters:
                logger.warning("%s", one)

    def begin(self, batches: Sequence[Any]) -> None:
        """Before the forward passes of a step with these micro-batches of the rank. Collective in the first step."""
        self._attempts += 1
        if self._attempts == 1:
            self._compare_copies("before the first step", buffers=True)
            for problem in broken_ties(base_model(self._run.model)) if self._engine.layout.tp == 1 else ():
                logger.warning("%s", problem)
            if self._begun < self._last:
                self._arrivals = GradientArrivals(list(self._trainable.values()))
                self._weights = WeightMovement(self._engine, self._names)
                if self._weights.known:
                    self._weights.begin()
        if self._begun >= self._last:
            return
        self._census.add(batches)
        if self._arrivals is not None:
            self._arrivals.listen()
        self._measures = self._weights is not None and self._weights.known and (self._is_last or self._attempts == 1)
        if self._measures and self._weights is not None:
            self._missing_before = set(self._arrivals.missing) if self._arrivals is not None else set()
            self._weights.before_step(put_back=self._attempts >= _FEW)

    def before_update(self, batches: Sequence[Any], items: ItemCount) -> None:
        """After the backward passes of a step with these micro-batches and items. Collective in the first step.

        What the loss depends on is tried before the update: until then, factors that begin at zero hide others.
        """
        if self._attempts > 1 or self._arrivals is None:
            return
        self._arrivals.look()
        if self._arrivals.missing:
            self._report_detached([self._names[number] for number in self._arrivals.missing], batches[0], items)

    def end(self, applied: bool, loss: torch.Tensor, rate: Any) -> bool:
        """After a step. Whether this was the last one that is looked at. Collective in some steps.

        Args:
            applied: whether the weights were updated.
            loss: the contribution of this rank to the loss.
            rate: the learning rate.

        Raises:
            ConfigError: the learning rate is negative.
        """
        if self._begun >= self._last:
            return True
        if isinstance(rate, float) and rate < 0:
            raise ConfigError(
                f"The learning rate of step {self._done + 1} is {rate:g}: with a negative one, training raises the "
                "loss. Correct the schedule, or the length for which it was made."
            )
        is_last = self._is_last and (applied or self._attempts > 2 * STEPS)
        if self._measures and self._weights is not None:
            sizes = self._weights.step_sizes()
            if applied:
                self._sizes[len(self._rates)] = [one for one in sizes if one is not None]
        self._done += applied
        self._loss_of_steps.append(loss)
        self._norms.append(self._engine.norm_of_step())
        self._rates.append(rate)
        arrivals = self._arrivals
        if arrivals is not None and arrivals.missing and (is_last or self._attempts in (2, 4, 8, 16)):
            arrivals.look()
        if is_last:
            self._judge()
        return is_last

    @property
    def _is_last(self) -> bool:
        return self._done + 1 >= self._last

    # -- weights ------------------------------------------------------------------------------------------------------

    def _compare_copies(self, when: str, buffers: bool) -> None:
        different = different_copies(self._run.model, self._engine.groups, buffers)
        if different:
            model = self._run.model
            names = grouped(
                [one.name for one in different],
                [name for name, _ in (*model.named_parameters(), *model.named_buffers())],
            )
            logger.warning(
                "Ranks hold different copies of %s %s (rank %d not what rank 0 has), so they train different models. "
                "Load or initialize the same values on all ranks (the same seed and files), and let no callback "
                "change weights on one rank only.",
                in_words(names),
                when,
                different[0].rank,
            )

    def _report_detached(self, names: list[str], batch: Any, items: ItemCount) -> None:
        """Warn of tensors without a gradient that the loss depends on. Collective."""
        if self._method is None or len(names) == len(self._names):
            return
        groups = grouped(names, self._names)
        model, losses, method = self._engine.deepspeed, self._losses, self._method
        of_user = getattr(method.call, "__self__", None)

        def loss() -> float:
            with losses.sharded(batch) as local, torch.no_grad():
                return float(losses.of(method, model, self._prepare(local), items.divisor))

        try:
            with (
                nullcontext() if of_user is None else plain_attributes_restored(of_user),
                unchanged(model.module),
            ):
                depends = groups_in_loss(groups, self._trainable, loss)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            return  # the loss contains a backward pass, on all ranks: it cannot be tried without one
        self._detached = {name for names in depends.values() for name in names}
        if depends:
            logger.warning(
                "No gradient reaches %s in step %d, although the loss depends on it: it does not learn. Look for "
                "torch.no_grad(), detach(), .data, .item(), numpy or rounding between it and the loss, and for "
                "reentrant gradient checkpointing of inputs without gradient; or freeze it: requires_grad_(False).",
                in_words(depends),
                self._done + 1,
            )

    # -- the end ------------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Report what the steps have shown. Collective; waits for the device."""
        steps = len(self._rates)
        rates = [float(rate) for rate in self._rates]
        norms = [math.nan if norm is None else float(norm) for norm in self._norms]
        sums = torch.stack(self._loss_of_steps).double()
        distributed.all_reduce_sum(sums, group=self._engine.groups.seq_data_parallel)
        losses = sums.tolist()
        problems = list(self._census.findings(steps))
        trained = not any("no target" in one for one in problems)
        problems += self._about_rates(rates)
        if trained:
            problems += self._about_losses(losses, norms, rates)
        problems += self._about_weights(norms, rates)
        for problem in problems:
            logger.warning("%s", problem)
        self._compare_copies(f"after step {self._done}", buffers=False)

    def _about_rates(self, rates: Sequence[float]) -> Iterator[str]:
        if len(rates) > 1 and not any(rates):
            yield (
                f"The learning rate was 0 in each of the first {len(rates)} steps, so no weight has changed. Look at "
                "learning_rate, warmup_steps and the schedule."
            )

    def _about_losses(self, losses: Sequence[float], norms: Sequence[float], rates: Sequence[float]) -> Iterator[str]:
        steps = len(losses)
        if steps >= _FEW and any(rates) and losses[0] and len(set(losses)) == 1 and math.isfinite(losses[0]):
            yield (
                f"The loss was exactly {losses[0]:g} in each of the first {steps} steps: it does not depend on what is "
                "trained, or the learning rate is too small to be seen. Look at compute_loss, at what is frozen, and "
                "at learning_rate."
            )
        if steps > 1 and not any(norms):
            yield (
                f"The gradient was 0 in each of the first {steps} steps: nothing learns. Look at the labels, at "
                "compute_loss (a loss that is constant or detached), and at what is frozen."
            )
        limit = self._run.events.args.max_grad_norm
        if steps >= _FEW and limit and all(norm > _CLIPPED * limit for norm in norms):
            yield (
                f"The gradient norm was at least {min(norms):.3g} in each of the first {steps} steps, and "
                f"max_grad_norm={limit:g} divided it by more than {_CLIPPED:,.0f} each time. A loss that is a sum "
                "instead of a mean does this. Divide it, or raise max_grad_norm."
            )
        # ln(vocabulary) if the loss is a mean over tokens of a language model's vocabulary. A script's need not be.
        called: Any = None if self._method is None else self._losses.loss_function or self._method.call
        own = getattr(called, "__module__", "").startswith("ds_trainer.")
        config: Any = getattr(self._run.model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        size = getattr(text, "vocab_size", None)
        shifted = own and self._losses.rule.count.shifted
        guess = math.log(size) if shifted and isinstance(size, int) and size > 1 else None
        if self._begun == 0 and guess and losses[0] > _WORSE_THAN_GUESSING * guess:
            yield (
                f"The loss of the first step, {losses[0]:.4g}, is far above that of guessing each token of the "
                f"vocabulary alike, {guess:.4g}. Look whether tokenizer and labels belong to this model, whether its "
                "weights were loaded, how large new weights are, and whether the loss is a sum instead of a mean."
            )

    def _about_weights(self, norms: Sequence[float], rates: Sequence[float]) -> Iterator[str]:
        arrivals, weights = self._arrivals, self._weights
        missing = set() if arrivals is None else {self._names[number] for number in arrivals.missing}
        if missing - self._detached and any(norms):
            yield from self._about_unused(missing - self._detached)
        if weights is None or not weights.known:
            return
        peaks = dict(zip(self._names, weights.rates(), strict=True))
        without = [name for name, peak in peaks.items() if peak is None]
        if without:
            yield (
                f"The optimizer has no parameter group with {in_words(grouped(without, self._names))}, so "
                f"{'it is' if len(without) == 1 else 'they are'} not trained, although requires_grad is True. Add "
                "what is missing to the optimizer (which must be built after the model is complete), or freeze it: "
                "requires_grad_(False)."
            )
        peak = max((peak for peak in peaks.values() if peak), default=0.0)
        still = [
            name
            for number, (name, moved) in enumerate(zip(self._names, weights.moved(), strict=True))
            # A group may be frozen by its learning rate, and the last step may be the first with a gradient.
            if peaks[name]
            and not moved
            and name not in missing
            and number not in self._missing_before
            and self._trainable[name].requires_grad
        ]
        # The rates of a warm-up, and those at the end of a short run, say little about the run.
        telling = [number for number in self._sizes if rates[number] * 2 >= peak > 0]
        if still and any(norms) and max(rates[:-1] or rates) * 2 >= peak > 0:
            yield from self._about_movement(still, max(rates))
        elif telling:
            yield from self._about_sizes(self._sizes[telling[-1]], rates[telling[-1]])

    def _about_unused(self, missing: set[str]) -> Iterator[str]:
        """Tensors that never had a gradient, if that is all of an adapter or nearly all that is trained."""
        adapter = [name for name in self._names if "lora_" in name] if saves_adapters(self._run.model) else []
        every = sum(full_numel(one) for one in self._trainable.values())
        unused = sum(full_numel(self._trainable[name]) for name in missing)
        what = ""
        if adapter and missing.issuperset(adapter):
            what = f"the adapter ({len(adapter)} tensors)"
        elif unused >= _ALL * every:
            what = f"{in_words(grouped(missing, self._names))} ({100 * unused / every:.3g} % of what is trained)"
        if what:
            yield (
                f"{what[0].upper()}{what[1:]} had no gradient in the first {len(self._rates)} steps: the loss does "
                "not use it. Look whether the adapter is active (set_adapter), whether target_modules are those that "
                "run, and whether compute_loss calls the model that is trained."
            )

    def _about_movement(self, still: list[str], rate: float) -> Iterator[str]:
        kind, remedy = self._number_format()
        yield (
            f"{in_words(grouped(still, self._names))} did not change in the first {len(self._rates)} steps, although "
            f"there are gradients and the learning rate is {rate:.3g}: the updates are too small for {kind}, or "
            f"something restores the weights.{remedy} Raise learning_rate, or look at callbacks and hooks that write "
            "weights."
        )

    def _about_sizes(self, sizes: Sequence[StepSize], rate: float) -> Iterator[str]:
        if not sizes:
            return
        ratio, changed = statistics.median(one.ratio for one in sizes), statistics.median(one.changed for one in sizes)
        if ratio > 1:
            yield (
                f"One step changed the weights by {ratio:.2g} times their size (median of {len(sizes)} tensors) at a "
                f"learning rate of {rate:.3g}; usual is a thousandth. Lower learning_rate."
            )
        elif 0 < changed < _FEW_CHANGED:
            kind, remedy = self._number_format()
            yield (
                f"One step changed only {100 * changed:.2g} % of the weights (median of {len(sizes)} tensors) at a "
                f"learning rate of {rate:.3g}: the other updates are too small for {kind} and are rounded away."
                f"{remedy} Or raise learning_rate."
            )

    def _number_format(self) -> tuple[str, str]:
        """Of the stepped weights, and what to change if it is one of 16 bits."""
        assert self._weights is not None
        kind = str(self._weights.dtype).removeprefix("torch.")
        return kind, "" if self._weights.dtype.itemsize > 2 else " Keep 32-bit masters (drop master_weights_and_grads)."
