"""What a rule is, and what it is asked about.

A rule is asked about a finished draft of the configuration, before any process group exists. Its sentence is put
together from the values that break it, as they were said and where, what is needed, and the remedy.

Sources, DeepSpeed 0.19.8: ``runtime/engine.py``, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``,
``runtime/zenflow``, ``runtime/superoffload``, ``runtime/bf16_optimizer.py``; and measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.environment import Environment
from ds_trainer.config.library_optimizers import LibraryOptimizer, library_optimizer
from ds_trainer.parallel.layout import ParallelLayout

_SHORT_NAMES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Case:
    """What a rule is asked about."""

    config: CompiledConfig
    args: TrainingArguments
    layout: ParallelLayout
    device: str
    environment: Environment | None
    client_optimizer: str | None = None

    def get(self, path: str, default: Any = None) -> Any:
        """A value of the configuration."""
        return self.config.get(path, default)

    def zero(self, key: str, default: Any = None) -> Any:
        """A value of ``zero_optimization``."""
        return self.config.get(f"zero_optimization.{key}", default)

    def on(self, path: str) -> bool:
        """Whether a switch of the configuration is on."""
        return self.config.get(path, False) is True

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self.zero("stage", 0))

    @property
    def optimizer(self) -> str:
        """Name of the optimizer, lower case; empty for one that is handed in."""
        return str(self.get("optimizer.type", "")).lower()

    @property
    def library(self) -> LibraryOptimizer | None:
        """The optimizer of a library that the arguments ask for; None for any other."""
        return library_optimizer(self.args) if self.client_optimizer is None else None

    def said(self, name: str) -> str | None:
        """A value of the configuration or an argument as somebody said it; None where there is none."""
        if name in self.config:
            return self.config.said(name)
        if hasattr(self.args, name):
            return f"{name}={getattr(self.args, name)} ({self.args.where(name)})"
        return None

    def offloads(self, what: str, *devices: str) -> bool:
        """Whether ``optimizer`` or ``param`` is offloaded (to one of ``devices``, default any)."""
        device = self.zero(f"offload_{what}.device", "none")
        return device != "none" and (not devices or device in devices)

    @property
    def on_cpu(self) -> bool:
        """Whether the run is on the CPU."""
        return self.device == "cpu"

    @property
    def model_dtype(self) -> str:
        """Type of the weights: fp16, bf16 or fp32."""
        return next((name for name in ("fp16", "bf16") if self.on(f"{name}.enabled")), "fp32")

    @property
    def accumulation_dtype(self) -> str:
        """Type in which gradients are accumulated."""
        name = str(self.get("data_types.grad_accum_dtype") or self.model_dtype).removeprefix("torch.")
        return _SHORT_NAMES.get(name, name)

    @property
    def uses_cpu_adam(self) -> bool:
        """Whether the optimizer is DeepSpeed's CPUAdam."""
        return (
            self.optimizer in ("adam", "adamw")
            and self.offloads("optimizer")
            and not self.get("optimizer.params.torch_adam", False)
        )

    def lacks(self, package: str) -> bool:
        """Whether this machine is known to be without a package."""
        return self.environment is not None and self.environment.version(package) is None


@dataclass(frozen=True)
class Rule:
    """One combination that cannot run.

    Attributes:
        name: short and unique, for tests and documentation.
        topic: heading in the support matrix.
        culprits: paths (or arguments) whose values are named in the sentence; those that are set.
        broken: whether a case breaks the rule.
        needs: what is needed, a clause: "fp16 needs a GPU".
        remedy: what to change, a sentence.
    """

    name: str
    topic: str
    culprits: tuple[str, ...]
    broken: Callable[[Case], bool]
    needs: str
    remedy: str

    def sentence(self, case: Case) -> str:
        """The refusal."""
        named = [said for name in self.culprits if (said := case.said(name)) is not None]
        return f"{' and '.join(dict.fromkeys(named))}{': ' if named else ''}{self.needs}. {self.remedy}"
