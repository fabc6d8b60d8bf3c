"""Replaces the classes of transformers in this process, for code imported afterwards and for code imported before.

*Afterwards*: an import hook (``sys.meta_path``) makes the modules of :data:`REPLACED` when they are imported. Such a
module hands out the objects of this package. Its source is executed only when a name is requested that this package
does not replace, so that ``from transformers import Trainer`` does not import transformers' Trainer at all.

*Before*: every global variable of every imported module that holds an original object gets the replacement. A subclass
of an original class cannot be changed and is refused.

Source: ``_LazyModule`` of transformers 5 reads top-level names from the submodules at first use, and stores them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import ds_trainer
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import likely_rank
from ds_trainer.utils.replaced_transformers import set_replaced

_CALLBACKS = (
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "PrinterCallback",
    "ProgressCallback",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
)
_STRATEGIES = ("HubStrategy", "IntervalStrategy", "SaveStrategy", "SchedulerType")

REPLACED: dict[str, tuple[str, ...]] = {
    "transformers.trainer": (
        "Trainer",
        "TrainingArguments",
        *(name for name in _CALLBACKS if name != "EarlyStoppingCallback"),
        *("EvalLoopOutput", "EvalPrediction", "PredictionOutput"),
        *("HubStrategy", "OptimizerNames", "ParallelMode", "SaveStrategy", "default_data_collator"),
    ),
    "transformers.trainer_seq2seq": ("Seq2SeqTrainer",),
    "transformers.training_args": ("TrainingArguments", "OptimizerNames", "ParallelMode", *_STRATEGIES),
    "transformers.training_args_seq2seq": ("Seq2SeqTrainingArguments",),
    "transformers.trainer_callback": (*_CALLBACKS, "ExportableState"),
    "transformers.trainer_utils": ("EvalLoopOutput", "EvalPrediction", "PredictionOutput", *_STRATEGIES),
    "transformers.hf_argparser": ("HfArgumentParser", "HfArg"),
    "transformers.data.data_collator": ("default_data_collator",),
}
"""Names by module. ``transformers`` itself takes its names from these modules."""

WITHOUT_OTHER_NAMES = ("transformers.trainer_seq2seq", "transformers.training_args_seq2seq")
"""Modules of which nothing is left. Their source would subclass the replaced classes."""

NEEDS_OUR_BASE = (
    *("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"),
    *("HfArgumentParser", "TrainerControl", "TrainerState"),
)
"""Classes whose subclasses cannot be used if they inherit from the class of transformers. A callback can."""

_NOT_PUBLIC = {
    "ExportableState": "ds_trainer.callbacks.state",
    "ParallelMode": "ds_trainer.arguments.process_info",
}


def all_names() -> list[str]:
    """Every replaced name once."""
    return list(dict.fromkeys(name for names in REPLACED.values() for name in names))


def replacement(name: str) -> Any:
    """The object of this package for ``name``; imports the module that defines it."""
    if name in _NOT_PUBLIC:
        return getattr(import_module(_NOT_PUBLIC[name]), name)
    return getattr(ds_trainer, name)


def replace_transformers(announce: bool = True) -> None:
    """Replace the names of :data:`REPLACED` in this process; imports nothing of it. A second call does nothing.

    Args:
        announce: whether the main process prints one line.

    Raises:
        ConfigError: modules imported before define subclasses of the original classes; nothing is replaced then.
    """
    if any(isinstance(finder, _ReplacementFinder) for finder in sys.meta_path):
        return
    originals = _originals()
    problems = [problem for value, name in originals.values() for problem in _subclass_problems(value, name, originals)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    sys.meta_path.insert(0, _ReplacementFinder())
    set_replaced(_join_ranks)
    if originals:
        _replace_globals(originals)
    if announce and likely_rank(os.environ) == 0:
        print(
            f"ds-trainer: this process uses ds_trainer {ds_trainer.__version__} in place of transformers' Trainer, "
            f"TrainingArguments and {len(all_names()) - 2} names that belong to them.",
            file=sys.stderr,
            flush=True,
        )


def _join_ranks(args: Any) -> None:
    from ds_trainer.training.startup.process_setup import join_ranks

    join_ranks(args)


# -- imported afterwards -----------------------------------------------------------------------------------------------


class _ReplacementFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of :data:`REPLACED`, and gives them a loader of this file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REPLACED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Makes a :class:`_ReplacedModule`, and executes the original source when one of its own names is requested."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.started = False
        self.lock = threading.RLock()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _ReplacedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing yet: see :meth:`execute`."""

    def execute(self, module: ModuleType) -> None:
        """Execute the source in ``module``, then set the replaced names. A second call does nothing."""
        with self.lock:
            if self.started:
                return
            self.started = True
            try:
                self.original.exec_module(module)
            except BaseException:
                self.started = False  # the next request raises the same error
                raise
            for name in REPLACED[module.__name__]:
                setattr(module, name, replacement(name))


class _ReplacedModule(ModuleType):
    """A module of transformers with objects of this package."""

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        if name in REPLACED[module]:
            value = replacement(name)
            setattr(self, name, value)
            return value
        special = name.startswith("__") and name.endswith("__") and name != "__all__"
        if not special and module not in WITHOUT_OTHER_NAMES:
            loader = self.__dict__["__loader__"]
            loader.execute(self)
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=self)


# -- imported before ---------------------------------------------------------------------------------------------------


def _originals() -> dict[int, tuple[Any, str]]:
    """The original objects that this process has imported, and their names, by ``id``."""
    originals: dict[int, tuple[Any, str]] = {}
    for module, names in REPLACED.items():
        for name in names:
            value = vars(sys.modules[module]).get(name) if module in sys.modules else None
            if value is not None:
                originals[id(value)] = (value, name)
    return originals


def _subclass_problems(value: Any, name: str, originals: dict[int, tuple[Any, str]]) -> list[str]:
    if not isinstance(value, type) or name not in NEEDS_OUR_BASE:
        return []
    return [
        f"{subclass.__module__}.{subclass.__qualname__} is a subclass of transformers' {name}, because its module was "
        "imported before ds_trainer.as_transformers. Make `import ds_trainer.as_transformers` the first import of the "
        "script (in a notebook: restart the kernel first), or start the script with `ds-trainer run SCRIPT`."
        for subclass in _subclasses(value)
        if id(subclass) not in originals
    ]


def _subclasses(cls: type) -> Iterator[type]:
    children: list[type] = type.__subclasses__(cls)
    for child in children:
        yield child
        yield from _subclasses(child)


def _replace_globals(originals: dict[int, tuple[Any, str]]) -> None:
    for module in list(sys.modules.values()):
        variables = getattr(module, "__dict__", None)
        if not isinstance(variables, dict):  # libraries may put any object into sys.modules
            continue
        for variable, value in list(variables.items()):
            if id(value) in originals:
                variables[variable] = replacement(originals[id(value)][1])
