"""The names of transformers that this package replaces, by the modules in which scripts and libraries look for them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import ds_trainer

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
