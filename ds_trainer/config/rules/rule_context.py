"""``Rule``: a combination of settings that cannot run; and ``RuleContext``: the settings that rules read.

Rules are checked on the complete configuration, before any process group exists. The message of a broken rule names
the values that break it with their sources, then the requirement, then the remedy.

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
from ds_trainer.config.library_optimizer_table import LibraryOptimizer, library_optimizer
from ds_trainer.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class RuleContext:
    """The settings of a run, which rules read."""

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

    def zeropp(self, key: str) -> Any:
        """A value of ZeRO++, which DeepSpeed reads at stage 3; None at others."""
        return self.zero(key) if self.stage == 3 else None

    def on(self, path: str) -> bool:
        """Whether a boolean value of the configuration is true."""
        return self.config.get(path, False) is True

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.config.zero_stage

    @property
    def optimizer(self) -> str:
        """Name of the optimizer in lower case; empty for an optimizer object."""
        return (self.config.optimizer_type or "").lower()

    @property
    def library(self) -> LibraryOptimizer | None:
        """The row of the requested library optimizer; None for any other optimizer."""
        return library_optimizer(self.args) if self.client_optimizer is None else None

    def describe(self, name: str) -> str | None:
        """A value of the configuration (of a section, its first) or an argument with its source; None without it."""
        for path in self.config.paths():
            if path == name or path.startswith(f"{name}."):
                return self.config.describe(path)
        if hasattr(self.args, name):
            return f"{name}={getattr(self.args, name)} ({self.args.where(name)})"
        return None

    def offloads(self, state: str, *devices: str) -> bool:
        """Whether ``optimizer`` or ``param`` is offloaded (to one of ``devices``; default: to any)."""
        device = self.config.offload(state)
        return device is not None and (not devices or device in devices)

    @property
    def on_cpu(self) -> bool:
        """Whether the job runs on CPUs."""
        return self.device == "cpu"

    @property
    def model_dtype(self) -> str:
        """Dtype of the weights: fp16, bf16 or fp32."""
        return self.config.precision.dtype

    @property
    def accumulation_dtype(self) -> str:
        """Dtype in which gradients are accumulated."""
        return self.config.accumulation_dtype

    @property
    def uses_cpu_adam(self) -> bool:
        """Whether the optimizer is DeepSpeed's CPUAdam."""
        return (
            self.optimizer in ("adam", "adamw")
            and self.offloads("optimizer")
            and not self.get("optimizer.params.torch_adam", False)
        )

    def lacks(self, package: str) -> bool:
        """Whether a package is known to be missing on this machine."""
        return self.environment is not None and self.environment.version(package) is None


@dataclass(frozen=True)
class Rule:
    """One combination that cannot run.

    Attributes:
        name: short unique name, for tests and documentation.
        topic: heading in the support matrix.
        culprits: paths, sections or arguments whose values the message names, if they are set.
        broken: whether a context breaks the rule.
        needs: the requirement, a clause: "fp16 needs a GPU".
        remedy: what to change, a sentence.
        refuses: False if DeepSpeed ignores the setting, which is then said in a warning.
    """

    name: str
    topic: str
    culprits: tuple[str, ...]
    broken: Callable[[RuleContext], bool]
    needs: str
    remedy: str
    refuses: bool = True

    def sentence(self, context: RuleContext) -> str:
        """The message for a context that breaks the rule."""
        named = [value for name in self.culprits if (value := context.describe(name)) is not None]
        return f"{' and '.join(dict.fromkeys(named))}{': ' if named else ''}{self.needs}. {self.remedy}"
