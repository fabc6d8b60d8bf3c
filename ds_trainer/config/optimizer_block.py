"""The ``optimizer`` block of the configuration, and the switches of ZeRO that depend on it."""

from __future__ import annotations

import json

from ds_trainer.arguments.enums import OptimizerNames
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.arguments.typed import WrongType, read_as
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.compiled import Origin
from ds_trainer.config.draft import Draft
from ds_trainer.config.library_optimizers import LibraryOptimizer, library_optimizer
from ds_trainer.config.optimizer_types import OF_NAME, TYPES, OptimizerType
from ds_trainer.config.schema_values import AUTO, complaint
from ds_trainer.utils.errors import did_you_mean

_PARAMS = "optimizer.params"


def write_optimizer(draft: Draft, args: TrainingArguments, device: str, client_optimizer: str | None) -> None:
    """Write the optimizer that arguments and file ask for, or note what contradicts.

    Args:
        draft: where it goes; ZeRO stage and offload are already in it.
        args: the arguments.
        device: ``"cpu"`` or ``"cuda"``.
        client_optimizer: where the optimizer comes from when not from here.
    """
    library = library_optimizer(args) if client_optimizer is None else None
    if library is not None:
        client_optimizer = f"optim={args.optim} ({args.where('optim')})"
        _library_arguments(draft, args, library)
    if client_optimizer is not None:
        if draft.mentions("optimizer"):
            draft.problems.append(
                f"{draft.first_place('optimizer')} has an optimizer, but {client_optimizer}. Keep one of them."
            )
        draft.derive("zero_allow_untested_optimizer", True, client_optimizer)
        if _offloaded(draft):
            draft.derive("zero_force_ds_cpu_optimizer", False, client_optimizer)
        return
    kind = _type(draft, args)
    _wrong_numbers(draft, kind)
    for name, fields in kind.arguments:
        values = [getattr(args, field) for field in fields]
        draft.argument(f"{_PARAMS}.{name}", values if len(values) > 1 else values[0], *fields)
    _optimizer_arguments(draft, args, kind)
    _unknown_parameters(draft, kind)
    own_adam = kind.name in ("Adam", "AdamW", "Muon") and _torch_adam(draft, args, device, kind)
    draft.derive("zero_allow_untested_optimizer", not kind.tested, f"optimizer.type={kind.name}")
    if _offloaded(draft) and own_adam:
        why = "torch's optimizer on host memory: as good as DeepSpeed's there, and needs no compiler"
        draft.derive("zero_force_ds_cpu_optimizer", False, why)


def _library_arguments(draft: Draft, args: TrainingArguments, library: LibraryOptimizer) -> None:
    said = f"optim_args={args.optim_args} ({args.where('optim_args')})"
    for name, value in args.optimizer_arguments().items():
        if name not in library.own:
            known = f"Known are {', '.join(sorted(library.own))}." if library.own else "It takes none."
            draft.problems.append(
                f"{said}: '{name}' is not an argument of optim={args.optim}.{did_you_mean(name, library.own)} {known}"
            )
            continue
        try:
            read_as(Located(value, ""), library.own[name][0])
        except WrongType as error:
            draft.problems.append(f"{said}: {name} of optim={args.optim}: {error}.")


def _offloaded(draft: Draft) -> bool:
    return bool(draft.config.get("zero_optimization.offload_optimizer.device", "none") != "none")


def _type(draft: Draft, args: TrainingArguments) -> OptimizerType:
    path = "optimizer.type"
    wanted = OF_NAME[OptimizerNames(args.optim)]
    entry = draft.drop(path)
    if entry is None or entry.value == AUTO:
        draft.argument(path, wanted, "optim")
        return TYPES[wanted.lower()]
    asked = str(entry.plain())
    kind = TYPES.get(asked.lower())
    if kind is None:
        draft.problems.append(
            f"{path}={json.dumps(asked)} in {entry.where} is not an optimizer that works here."
            f"{did_you_mean(asked, [known.name for known in TYPES.values()])} There are: "
            f"{', '.join(known.name for known in TYPES.values())}."
        )
        kind = TYPES[wanted.lower()]
    elif args.given("optim") and _family(asked) != _family(wanted):
        draft.problems.append(
            f"{path}={json.dumps(asked)} in {entry.where}, but optim={args.optim} ({args.where('optim')}). Keep one of "
            "them."
        )
    draft.config.set(path, kind.name, Origin("user", "", entry.where))
    return kind


def _family(name: str) -> str:
    lowered = name.lower()
    return "adamw" if lowered == "adam" else lowered  # DeepSpeed's Adam is AdamW unless adam_w_mode is false


def _optimizer_arguments(draft: Draft, args: TrainingArguments, kind: OptimizerType) -> None:
    known = kind.own | {name for name, _ in kind.arguments}
    for name, value in args.optimizer_arguments().items():
        if name not in known:
            draft.problems.append(
                f"optim_args={args.optim_args} ({args.where('optim_args')}): '{name}' is not an argument of "
                f"{kind.name} (optim={args.optim}).{did_you_mean(name, known)} Known are {', '.join(sorted(known))}."
            )
        elif name not in kind.own:
            field = dict(kind.arguments)[name]
            draft.problems.append(
                f"optim_args={args.optim_args} ({args.where('optim_args')}): set {' and '.join(field)} instead of "
                f"'{name}'."
            )
        else:
            draft.argument(f"{_PARAMS}.{name}", value, "optim_args")


def _wrong_numbers(draft: Draft, kind: OptimizerType) -> None:
    """Note parameters of another type, and leave them out of the comparison with the arguments.

    The schema has looked at them where the file names the optimizer; here it is known in any case.
    """
    described = draft.schema.types["optimizer"].get(kind.name)
    for name, entry in draft.below(_PARAMS):
        field = described.fields.get(name) if described is not None else None
        wrong = list(complaint(entry, field, f"{_PARAMS}.{name}")) if field is not None else []
        if wrong:
            draft.problems += wrong
            draft.drop(f"{_PARAMS}.{name}")
    for name, fields in kind.arguments:
        value = draft.asked(f"{_PARAMS}.{name}")
        if value is None:
            continue
        numbers = value if len(fields) > 1 and isinstance(value, list) else [value]
        right = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
        if not right or len(numbers) != len(fields):
            where = draft.where(f"{_PARAMS}.{name}")
            draft.drop(f"{_PARAMS}.{name}")
            wanted = "a number" if len(fields) == 1 else f"a list of {len(fields)} numbers"
            draft.problems.append(f"{where}: {_PARAMS}.{name}={json.dumps(value)} must be {wanted}.")


def _unknown_parameters(draft: Draft, kind: OptimizerType) -> None:
    known = kind.own | {name for name, _ in kind.arguments}
    for name, entry in draft.below(_PARAMS):
        if name not in known and entry.value == AUTO:
            draft.drop(f"{_PARAMS}.{name}")  # a template for several optimizers
        elif name not in known:
            instead = " Set gradient_clipping (max_grad_norm)." if name == "max_grad_norm" else ""
            draft.problems.append(
                f"{entry.where}: {kind.name} has no parameter '{name}'.{instead or did_you_mean(name, known)} Known "
                f"are {', '.join(sorted(known))}."
            )


def _torch_adam(draft: Draft, args: TrainingArguments, device: str, kind: OptimizerType) -> bool:
    """Choose between torch's Adam and DeepSpeed's, for Muon the one beside it; True for torch's."""
    zero = "zero_optimization"
    if draft.asked(f"{zero}.offload_optimizer.super_offload") or draft.mentions(f"{zero}.zenflow"):
        use, why = False, "SuperOffload and ZenFlow work on DeepSpeed's CPUAdam (compiled at first use)"
    elif any(draft.asked(f"{name}.{name}_master_weights_and_grads") for name in ("fp16", "bf16")):
        use, why = False, "low-precision master weights work on DeepSpeed's Adam (compiled at first use)"
    elif _offloaded(draft) and device == "cuda":
        use, why = False, "offload on a GPU: DeepSpeed's vectorised CPUAdam (compiled at first use)"
    else:
        use, why = True, "torch.optim.AdamW needs no compiler"
    path = f"{_PARAMS}.torch_adam"
    # optim_args may have set it. ZenFlow hands all parameters on to torch's AdamW, which does not know this one.
    if path not in draft.config and not (draft.mentions(f"{zero}.zenflow") and draft.asked(path) is None):
        draft.derive(path, use, why)
    use = bool(draft.config.get(path, False))
    fused, foreach = f"{_PARAMS}.fused", draft.config.get(f"{_PARAMS}.foreach", draft.asked(f"{_PARAMS}.foreach"))
    wanted = args.optim == OptimizerNames.ADAMW_TORCH_FUSED and foreach is not True
    # Only where it is true: torch takes a false one as "no foreach either".
    if use and fused not in draft.config and "fused" in kind.own and (wanted or draft.mentions(fused)):
        draft.derive(fused, wanted, f"optim={args.optim}")
    return use
