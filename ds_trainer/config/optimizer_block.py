"""Writes the ``optimizer`` block of the configuration, and the ZeRO settings that depend on it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ds_trainer.arguments.enums import OptimizerNames
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.arguments.typed import WrongType, read_as
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.compiled import Origin
from ds_trainer.config.config_builder import ConfigBuilder
from ds_trainer.config.library_optimizer_table import LibraryOptimizer, library_optimizer
from ds_trainer.config.schema_values import AUTO, complaint
from ds_trainer.utils.errors import did_you_mean

_PARAMS = "optimizer.params"
_OF_DEEPSPEED = ("bias_correction", "fp32_optimizer_states")


# The optimizers that a DeepSpeed configuration can name: their arguments, and the devices that support them.
#
# Names are those of DeepSpeed 0.19.8 (``runtime/engine.py``, ``_configure_basic_optimizer``): its own names are
# case-insensitive, any other name is a class of ``torch.optim``.


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


def write_optimizer(builder: ConfigBuilder, args: TrainingArguments, device: str, client_optimizer: str | None) -> None:
    """Write the optimizer that arguments and file request, and note conflicts.

    Args:
        builder: the configuration; ZeRO stage and offload are already set.
        args: the arguments.
        device: ``"cpu"`` or ``"cuda"``.
        client_optimizer: source of the optimizer if the arguments do not define it.
    """
    library = library_optimizer(args) if client_optimizer is None else None
    if library is not None:
        client_optimizer = f"optim={args.optim} ({args.where('optim')})"
        _check_library_arguments(builder, args, library)
    if client_optimizer is not None:
        if builder.mentions("optimizer"):
            builder.problems.add(
                f"{builder.first_source('optimizer')} has an optimizer, but {client_optimizer}. Keep one of them."
            )
        builder.derive("zero_allow_untested_optimizer", True, client_optimizer)
        if builder.config.offload("optimizer") is not None:
            builder.derive("zero_force_ds_cpu_optimizer", False, client_optimizer)
        return
    kind, supported = _optimizer_type(builder, args)
    _check_numbers(builder, kind)
    for name, fields in kind.arguments:
        values = [getattr(args, field) for field in fields]
        builder.argument(f"{_PARAMS}.{name}", values if len(values) > 1 else values[0], *fields)
    if not supported:  # what else it takes is not known
        for name, _ in builder.below(_PARAMS):
            builder.drop(f"{_PARAMS}.{name}")
        return
    _optimizer_arguments(builder, args, kind)
    _check_unknown_parameters(builder, kind)
    torch_adam = kind.name in ("Adam", "AdamW", "Muon") and _torch_adam(builder, args, device, kind)
    builder.derive("zero_allow_untested_optimizer", not kind.tested, f"optimizer.type={kind.name}")
    if builder.config.offload("optimizer") is not None and torch_adam:
        why = "torch's optimizer in host memory: equivalent to DeepSpeed's, and needs no compiler"
        builder.derive("zero_force_ds_cpu_optimizer", False, why)


def _check_library_arguments(builder: ConfigBuilder, args: TrainingArguments, library: LibraryOptimizer) -> None:
    given = f"optim_args={args.optim_args} ({args.where('optim_args')})"
    for name, value in args.optimizer_arguments().items():
        if name not in library.own:
            known = f"Valid names: {', '.join(sorted(library.own))}." if library.own else "It takes none."
            builder.problems.add(
                f"{given}: '{name}' is not an argument of optim={args.optim}.{did_you_mean(name, library.own)} {known}"
            )
            continue
        try:
            read_as(Located(value, ""), library.own[name][0])
        except WrongType as error:
            builder.problems.add(f"{given}: {name} of optim={args.optim}: {error}.")


def _optimizer_type(builder: ConfigBuilder, args: TrainingArguments) -> tuple[OptimizerType, bool]:
    """The optimizer, and whether it is the one that was asked for: ``optim`` stands in for one that is not known."""
    path = "optimizer.type"
    wanted = OF_NAME[OptimizerNames(args.optim)]
    entry = builder.drop(path)
    if entry is None or entry.value == AUTO:
        builder.argument(path, wanted, "optim")
        return TYPES[wanted.lower()], True
    requested = str(entry.plain())
    kind = TYPES.get(requested.lower())
    if kind is None:
        builder.problems.add(
            f"{path}={json.dumps(requested)} in {entry.where} is not a supported optimizer."
            f"{did_you_mean(requested, [known.name for known in TYPES.values()])} Supported: "
            f"{', '.join(known.name for known in TYPES.values())}."
        )
        builder.uncertain.add("optimizer")
        return TYPES[wanted.lower()], False
    if args.given("optim") and _family(kind.name, builder.requested(f"{_PARAMS}.adam_w_mode")) != _family(wanted):
        builder.problems.add(
            f"{path}={json.dumps(requested)} in {entry.where}, but "
            f"optim={args.optim} ({args.where('optim')}). Keep one of them."
        )
    builder.config.set(path, kind.name, Origin("user", "", entry.where))
    return kind, True


def _family(name: str, adam_w_mode: bool | None = None) -> str:
    return "AdamW" if name == "Adam" and adam_w_mode is not False else name  # as DeepSpeed reads it


def _optimizer_arguments(builder: ConfigBuilder, args: TrainingArguments, kind: OptimizerType) -> None:
    known = kind.own | {name for name, _ in kind.arguments}
    for name, value in args.optimizer_arguments().items():
        if name not in known:
            builder.problems.add(
                f"optim_args={args.optim_args} ({args.where('optim_args')}): '{name}' is not an argument of "
                f"{kind.name} (optim={args.optim}).{did_you_mean(name, known)} Valid names: {', '.join(sorted(known))}."
            )
        elif name not in kind.own:
            field = dict(kind.arguments)[name]
            builder.problems.add(
                f"optim_args={args.optim_args} ({args.where('optim_args')}): set {' and '.join(field)} instead of "
                f"'{name}'."
            )
        else:
            builder.argument(f"{_PARAMS}.{name}", value, "optim_args")


def _check_numbers(builder: ConfigBuilder, kind: OptimizerType) -> None:
    """Note parameters of a wrong type, and exclude them from the comparison with the arguments.

    The schema checks them only if the file names the optimizer; here the optimizer is always known.
    """
    described = builder.schema.types["optimizer"].get(kind.name)
    for name, entry in builder.below(_PARAMS):
        field = described.fields.get(name) if described is not None else None
        wrong = list(complaint(entry, field, f"{_PARAMS}.{name}")) if field is not None else []
        if wrong:
            builder.problems.extend(wrong)
            builder.leave_out(f"{_PARAMS}.{name}")
    for name, fields in kind.arguments:
        value = builder.requested(f"{_PARAMS}.{name}")
        if value is None:
            continue
        numbers = value if len(fields) > 1 and isinstance(value, list) else [value]
        right = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
        if not right or len(numbers) != len(fields):
            where = builder.where(f"{_PARAMS}.{name}")
            builder.leave_out(f"{_PARAMS}.{name}")
            wanted = "a number" if len(fields) == 1 else f"a list of {len(fields)} numbers"
            builder.problems.add(f"{where}: {_PARAMS}.{name}={json.dumps(value)} must be {wanted}.")


def _check_unknown_parameters(builder: ConfigBuilder, kind: OptimizerType) -> None:
    known = kind.own | {name for name, _ in kind.arguments}
    for name, entry in builder.below(_PARAMS):
        if name not in known and entry.value == AUTO:
            builder.drop(f"{_PARAMS}.{name}")  # "auto" in a template for several optimizers
        elif name not in known:
            instead = " Set gradient_clipping (max_grad_norm)." if name == "max_grad_norm" else ""
            builder.problems.add(
                f"{entry.where}: {kind.name} has no parameter '{name}'.{instead or did_you_mean(name, known)} Valid "
                f"names: {', '.join(sorted(known))}."
            )


def _torch_adam(builder: ConfigBuilder, args: TrainingArguments, device: str, kind: OptimizerType) -> bool:
    """Choose between torch's Adam and DeepSpeed's (for Muon: of its Adam part). Returns True for torch's."""
    zero = "zero_optimization"
    if builder.requested(f"{zero}.offload_optimizer.super_offload") or builder.mentions(f"{zero}.zenflow"):
        use, why = False, "SuperOffload and ZenFlow need DeepSpeed's CPUAdam (compiled at first use)"
    elif any(builder.requested(f"{name}.{name}_master_weights_and_grads") for name in ("fp16", "bf16")):
        use, why = False, "low-precision master weights need DeepSpeed's Adam (compiled at first use)"
    elif builder.config.offload("optimizer") is not None and builder.requested("zero_force_ds_cpu_optimizer") is True:
        use, why = False, "zero_force_ds_cpu_optimizer: DeepSpeed's CPUAdam (compiled at first use)"
    elif device == "cuda" and any(builder.mentions(f"{_PARAMS}.{name}") for name in _OF_DEEPSPEED):
        use, why = False, f"{' and '.join(_OF_DEEPSPEED)} are parameters of DeepSpeed's Adam (compiled at first use)"
    elif builder.config.offload("optimizer") is not None and device == "cuda":
        use, why = False, "offload on a GPU: DeepSpeed's vectorized CPUAdam (compiled at first use)"
    else:
        use, why = True, "torch.optim.AdamW needs no compiler"
    path = f"{_PARAMS}.torch_adam"
    # optim_args may have set it. ZenFlow passes all parameters to torch's AdamW, which does not accept this one.
    if path not in builder.config and not (builder.mentions(f"{zero}.zenflow") and builder.requested(path) is None):
        builder.derive(path, use, why)
    use = bool(builder.config.get(path, False))
    fused = f"{_PARAMS}.fused"
    foreach = builder.config.get(f"{_PARAMS}.foreach", builder.requested(f"{_PARAMS}.foreach"))
    wanted = args.optim == OptimizerNames.ADAMW_TORCH_FUSED and foreach is not True
    # Written only if true: torch reads fused=False as "no foreach either".
    if use and fused not in builder.config and "fused" in kind.own and (wanted or builder.mentions(fused)):
        if args.given("optim"):
            builder.determined(fused, wanted, "optim", f"optim={args.optim} ({args.where('optim')})")
        else:
            builder.derive(fused, wanted, f"optim={args.optim}")
    return use
