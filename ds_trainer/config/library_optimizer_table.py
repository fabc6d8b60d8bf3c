"""The optimizers from libraries: one row each, with their arguments, requirements and limits.

:mod:`ds_trainer.optim.library_optimizer_builder` builds them as client optimizers, so that the compiled
configuration has no ``optimizer`` block for them. Classes, arguments and defaults are those of transformers' Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_trainer.arguments.enums import OptimizerNames
from ds_trainer.arguments.training_arguments import TrainingArguments

Own = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class LibraryOptimizer:
    """One optimizer of a library.

    Attributes:
        package: the package that it needs, by its name on PyPI.
        cls: ``module:Class``.
        takes: which of ``betas``, ``eps``, ``weight_decay`` and ``warmup_steps`` come from TrainingArguments.
        fixed: arguments that the name implies.
        own: arguments that ``optim_args`` may set: ``(type, default)``, or ``(type,)`` if it is left out by default.
        low_rank: whether ``own`` applies only to the matrices of ``optim_target_modules``.
        shape: why it needs whole tensors; empty if it treats each element separately.
        swaps: whether ``eval()`` replaces the weights for evaluation and ``train()`` restores them.
        on_cpu: whether it runs without a GPU.
        note: a remark for the documentation.
    """

    package: str
    cls: str
    takes: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own: Own = field(default_factory=dict)
    low_rank: bool = False
    shape: str = ""
    swaps: bool = False
    on_cpu: bool = True
    note: str = ""

    @property
    def stage_0_only(self) -> bool:
        """Whether ZeRO must not shard the weights."""
        return bool(self.shape) or self.swaps


_ADAM = ("betas", "eps")
_BLOCKS = "quantized in blocks, so results depend slightly on how ZeRO shards"
_EIGHT = f"8-bit states {_BLOCKS}; embeddings keep 32-bit states at stage 0 only"


def _bitsandbytes(cls: str, bits: int, paged: bool | None, takes: tuple[str, ...], own: Own | None = None) -> Any:
    fixed = {"optim_bits": bits} | ({} if paged is None else {"is_paged": paged})
    note = _EIGHT if bits == 8 else ""
    return LibraryOptimizer("bitsandbytes", f"bitsandbytes.optim:{cls}", takes, fixed, own or {}, note=note)


_ADEMAMIX: Own = {
    **dict.fromkeys(("beta1", "beta2", "eps"), (float,)),
    "beta3": (float, 0.9999),
    "alpha": (float, 5.0),
    "t_alpha": (int,),
    "t_beta3": (int,),
}
_RMSPROP: Own = {"alpha": (float,), "eps": (float,), "momentum": (float,), "centered": (bool,)}
_PROJECTION = "projects the gradient of a matrix"
_GALORE: Own = {"rank": (int, 128), "update_proj_gap": (int, 200), "scale": (float, 0.25), "proj_type": (str, "std")}
_APOLLO: Own = {
    "rank": (int, 128),
    "proj": (str, "random"),
    "scale_type": (str, "channel"),
    "update_proj_gap": (int, 200),
    "scale": (float, 1.0),
    "proj_type": (str, "std"),
}
_NO_RELATIVE_STEP = {"scale_parameter": False, "relative_step": False}


def _galore(cls: str, fixed: Mapping[str, Any] | None = None, on_cpu: bool = True) -> LibraryOptimizer:
    return LibraryOptimizer(
        "galore-torch",
        f"galore_torch:{cls}",
        fixed=fixed or {},
        own=_GALORE,
        low_rank=True,
        shape=_PROJECTION,
        on_cpu=on_cpu,
    )


def _torchao(cls: str) -> LibraryOptimizer:
    own = {"block_size": (int, 256), "bf16_stochastic_round": (bool, False)}
    note = f"states {_BLOCKS}; compiled at the first step"
    return LibraryOptimizer("torchao", f"torchao.optim:{cls}", _ADAM, own=own, note=note)


def _schedule_free(cls: str, *takes: str) -> LibraryOptimizer:
    own = {"weight_lr_power": (float, 2.0), "r": (float, 0.0)}
    note = "evaluates and saves the averaged weights"
    return LibraryOptimizer(
        "schedulefree", f"schedulefree:{cls}", (*takes, "weight_decay"), own=own, swaps=True, note=note
    )


LIBRARY: dict[OptimizerNames, LibraryOptimizer] = {
    OptimizerNames.ADAFACTOR: LibraryOptimizer(
        "transformers",
        "transformers.optimization:Adafactor",
        fixed=_NO_RELATIVE_STEP,
        shape="keeps a row and a column per matrix and limits the update of each tensor",
    ),
    OptimizerNames.ADAMW_BNB: _bitsandbytes("AdamW", 8, False, _ADAM),
    OptimizerNames.ADAMW_8BIT: _bitsandbytes("AdamW", 8, False, _ADAM),
    OptimizerNames.PAGED_ADAMW: _bitsandbytes("AdamW", 32, True, _ADAM),
    OptimizerNames.PAGED_ADAMW_8BIT: _bitsandbytes("AdamW", 8, True, _ADAM),
    OptimizerNames.ADEMAMIX: _bitsandbytes("AdEMAMix", 32, False, _ADAM, _ADEMAMIX),
    OptimizerNames.ADEMAMIX_8BIT: _bitsandbytes("AdEMAMix", 8, False, _ADAM, _ADEMAMIX),
    OptimizerNames.PAGED_ADEMAMIX: _bitsandbytes("AdEMAMix", 32, True, _ADAM, _ADEMAMIX),
    OptimizerNames.PAGED_ADEMAMIX_8BIT: _bitsandbytes("AdEMAMix", 8, True, _ADAM, _ADEMAMIX),
    OptimizerNames.LION_8BIT: _bitsandbytes("Lion", 8, False, ("betas",)),
    OptimizerNames.PAGED_LION: _bitsandbytes("Lion", 32, True, ("betas",)),
    OptimizerNames.PAGED_LION_8BIT: _bitsandbytes("Lion", 8, True, ("betas",)),
    OptimizerNames.RMSPROP_BNB: _bitsandbytes("RMSprop", 32, None, (), _RMSPROP),
    OptimizerNames.RMSPROP_8BIT: _bitsandbytes("RMSprop", 8, None, (), _RMSPROP),
    OptimizerNames.RMSPROP_32BIT: _bitsandbytes("RMSprop", 32, None, (), _RMSPROP),
    OptimizerNames.ADAMW_TORCH_4BIT: _torchao("AdamW4bit"),
    OptimizerNames.ADAMW_TORCH_8BIT: _torchao("AdamW8bit"),
    OptimizerNames.GALORE_ADAMW: _galore("GaLoreAdamW"),
    OptimizerNames.GALORE_ADAMW_8BIT: _galore("GaLoreAdamW8bit", on_cpu=False),
    OptimizerNames.GALORE_ADAFACTOR: _galore("GaLoreAdafactor", _NO_RELATIVE_STEP),
    OptimizerNames.APOLLO_ADAMW: LibraryOptimizer(
        "apollo-torch", "apollo_torch:APOLLOAdamW", own=_APOLLO, low_rank=True, shape=_PROJECTION
    ),
    OptimizerNames.GROKADAMW: LibraryOptimizer(
        "grokadamw",
        "grokadamw:GrokAdamW",
        own={
            "alpha_init": (float, 0.98),
            "lamb": (float, 2.0),
            "gamma": (float, 0.1),
            "grokking_signal_decay_rate": (float, 0.1),
            "gradient_clipping": (float, 1.0),
        },
        shape="clips each tensor separately and counts tensors for its momentum",
    ),
    OptimizerNames.SCHEDULE_FREE_RADAM: _schedule_free("RAdamScheduleFree", *_ADAM),
    OptimizerNames.SCHEDULE_FREE_ADAMW: _schedule_free("AdamWScheduleFree", *_ADAM, "warmup_steps"),
    OptimizerNames.SCHEDULE_FREE_SGD: _schedule_free("SGDScheduleFree", "warmup_steps"),
    OptimizerNames.STABLE_ADAMW: LibraryOptimizer(
        "torch-optimi",
        "optimi:StableAdamW",
        (*_ADAM, "weight_decay"),
        own={"decouple_lr": (bool, False), "max_lr": (float, None), "kahan_sum": (bool, None)},
        shape="limits the update of each tensor",
    ),
}


def library_optimizer(args: TrainingArguments) -> LibraryOptimizer | None:
    """The row of ``args.optim``; None for an optimizer of torch or DeepSpeed."""
    return LIBRARY.get(OptimizerNames(args.optim))
