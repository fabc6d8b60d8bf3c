"""The optimizers that a DeepSpeed configuration can name: their arguments, and the devices that support them.

Names are those of DeepSpeed 0.19.8 (``runtime/engine.py``, ``_configure_basic_optimizer``): its own names are
case-insensitive, any other name is a class of ``torch.optim``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_trainer.arguments.enums import OptimizerNames

_ADAM = (("lr", ("learning_rate",)), ("betas", ("adam_beta1", "adam_beta2")), ("eps", ("adam_epsilon",)))
_DECAY = ("weight_decay", ("weight_decay",))


@dataclass(frozen=True)
class OptimizerType:
    """One optimizer.

    Attributes:
        name: its name in the configuration.
        arguments: parameters that TrainingArguments set, each with the names of those arguments.
        own: its other parameters.
        on_cpu: whether it runs without a GPU (and without offload).
        offloads: whether DeepSpeed has an implementation for optimizer states in host memory.
        tested: whether DeepSpeed allows it with ZeRO without ``zero_allow_untested_optimizer``.
        package: the package that it needs.
    """

    name: str
    arguments: tuple[tuple[str, tuple[str, ...]], ...]
    own: frozenset[str] = frozenset()
    on_cpu: bool = True
    offloads: bool = False
    tested: bool = True
    package: str | None = None


def _torch(name: str, *own: str, adam: bool = False) -> OptimizerType:
    arguments = (*_ADAM, _DECAY) if adam else (_ADAM[0], _DECAY)
    return OptimizerType(name, arguments, frozenset(own), tested=False)


_TYPES = (
    OptimizerType(
        "AdamW",
        (*_ADAM, _DECAY),
        frozenset(
            {"amsgrad", "torch_adam", "adam_w_mode", "fused", "foreach", "bias_correction", "fp32_optimizer_states"}
        ),
        offloads=True,
    ),
    OptimizerType(
        "Adam",
        (*_ADAM, _DECAY),
        frozenset(
            {"amsgrad", "torch_adam", "adam_w_mode", "fused", "foreach", "bias_correction", "fp32_optimizer_states"}
        ),
        offloads=True,
    ),
    OptimizerType("Adagrad", (_ADAM[0], _DECAY), frozenset({"eps", "lr_decay", "amsgrad"}), offloads=True),
    OptimizerType("Lion", (_ADAM[0], _ADAM[1], _DECAY), on_cpu=False, offloads=True),
    OptimizerType(
        "Lamb",
        (*_ADAM, _DECAY),
        frozenset({"bias_correction", "amsgrad", "max_coeff", "min_coeff", "eps_inside_sqrt"}),
        on_cpu=False,
        tested=False,
    ),
    OptimizerType(
        "Muon",
        (*_ADAM, _DECAY),
        frozenset({"momentum", "muon_lr", "adam_lr", "ns_method", "torch_adam", "adam_w_mode", "foreach"}),
        offloads=True,
    ),
    OptimizerType("MuAdam", (*_ADAM, _DECAY), tested=False, package="mup"),
    OptimizerType("MuAdamW", (*_ADAM, _DECAY), tested=False, package="mup"),
    OptimizerType(
        "MuSGD", (_ADAM[0], _DECAY), frozenset({"momentum", "nesterov", "dampening"}), tested=False, package="mup"
    ),
    _torch("SGD", "momentum", "dampening", "nesterov", "foreach", "fused"),
    _torch("RMSprop", "alpha", "eps", "momentum", "centered", "foreach"),
    _torch("NAdam", "momentum_decay", "decoupled_weight_decay", "foreach", adam=True),
    _torch("RAdam", "decoupled_weight_decay", "foreach", adam=True),
    _torch("Adamax", "foreach", adam=True),
    _torch("ASGD", "lambd", "alpha", "t0", "foreach"),
)
TYPES = {kind.name.lower(): kind for kind in _TYPES}

# The optimizer of each value of ``optim``.
OF_NAME = {
    OptimizerNames.ADAMW_TORCH: "AdamW",
    OptimizerNames.ADAMW_TORCH_FUSED: "AdamW",
    OptimizerNames.SGD: "SGD",
    OptimizerNames.ADAGRAD: "Adagrad",
    OptimizerNames.RMSPROP: "RMSprop",
    OptimizerNames.LION: "Lion",
    OptimizerNames.LAMB: "Lamb",
    OptimizerNames.MUON: "Muon",
}
# Built by this package. DeepSpeed builds all others.
BUILT_HERE = frozenset({"AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "ASGD"})
