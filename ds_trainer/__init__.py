"""ds_trainer: a DeepSpeed-first framework for training large models.

Public names are handed out lazily: ``import ds_trainer`` imports neither torch nor deepspeed, so that a command line
can check a recipe and print an error within a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "BestRun": "ds_trainer.training.search.best_run",
    "CompiledConfig": "ds_trainer.config.compiled",
    "ConfigError": "ds_trainer.utils.errors",
    "DataCollatorForLanguageModeling": "ds_trainer.data.collators",
    "DataCollatorForSeq2Seq": "ds_trainer.data.collators",
    "DataCollatorForTokenClassification": "ds_trainer.data.collators",
    "DataCollatorWithFlattening": "ds_trainer.data.collators",
    "DataCollatorWithPadding": "ds_trainer.data.collators",
    "DefaultDataCollator": "ds_trainer.data.collators",
    "DefaultFlowCallback": "ds_trainer.callbacks.defaults",
    "EarlyStoppingCallback": "ds_trainer.callbacks.early_stopping",
    "Environment": "ds_trainer.config.environment",
    "EvalLoopOutput": "ds_trainer.training.evaluation.outputs",
    "EvalPrediction": "ds_trainer.training.evaluation.outputs",
    "HPSearchBackend": "ds_trainer.training.search.best_run",
    "HfArg": "ds_trainer.arguments.parser",
    "HfArgumentParser": "ds_trainer.arguments.parser",
    "HubStrategy": "ds_trainer.arguments.enums",
    "IntervalStrategy": "ds_trainer.arguments.enums",
    "KerasModule": "ds_trainer.training.tf_trainer",
    "ModelShape": "ds_trainer.planner.model_shape",
    "OptimizerNames": "ds_trainer.arguments.enums",
    "PeerFailure": "ds_trainer.utils.failures",
    "ParallelLayout": "ds_trainer.parallel.layout",
    "PredictionOutput": "ds_trainer.training.evaluation.outputs",
    "PrinterCallback": "ds_trainer.callbacks.defaults",
    "ProgressCallback": "ds_trainer.callbacks.defaults",
    "Recipe": "ds_trainer.arguments.recipe",
    "RecordsCallback": "ds_trainer.callbacks.records",
    "SaveStrategy": "ds_trainer.arguments.enums",
    "SchedulerType": "ds_trainer.arguments.enums",
    "Seq2SeqTrainer": "ds_trainer.training.seq2seq_trainer",
    "Seq2SeqTrainingArguments": "ds_trainer.arguments.training_arguments",
    "TFTrainer": "ds_trainer.training.tf_trainer",
    "TrainOutput": "ds_trainer.training.train_loop",
    "Trainer": "ds_trainer.training.trainer",
    "TrainerCallback": "ds_trainer.callbacks.protocol",
    "TrainerControl": "ds_trainer.callbacks.state",
    "TrainerState": "ds_trainer.callbacks.state",
    "TrainingStopped": "ds_trainer.training.stopping.stopper",
    "TrainingArguments": "ds_trainer.arguments.training_arguments",
    "attention": "ds_trainer.parallel.attention",
    "compile_config": "ds_trainer.config.compiler",
    "default_compute_objective": "ds_trainer.training.search.objective",
    "default_data_collator": "ds_trainer.data.collators",
    "default_hp_space_optuna": "ds_trainer.training.search.spaces",
    "default_hp_space_ray": "ds_trainer.training.search.spaces",
    "default_hp_space_wandb": "ds_trainer.training.search.spaces",
    "from_pretrained": "ds_trainer.training.loading.pretrained",
}

__all__ = [
    "BestRun",
    "CompiledConfig",
    "ConfigError",
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "Environment",
    "EvalLoopOutput",
    "EvalPrediction",
    "HPSearchBackend",
    "HfArg",
    "HfArgumentParser",
    "HubStrategy",
    "IntervalStrategy",
    "KerasModule",
    "ModelShape",
    "OptimizerNames",
    "ParallelLayout",
    "PeerFailure",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "Recipe",
    "RecordsCallback",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "TFTrainer",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "TrainingStopped",
    "__version__",
    "attention",
    "compile_config",
    "default_compute_objective",
    "default_data_collator",
    "default_hp_space_optuna",
    "default_hp_space_ray",
    "default_hp_space_wandb",
    "from_pretrained",
]

if TYPE_CHECKING:
    from transformers import (
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification,
        DataCollatorWithFlattening,
        DataCollatorWithPadding,
        DefaultDataCollator,
    )

    from ds_trainer.arguments.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
    from ds_trainer.arguments.parser import HfArg, HfArgumentParser
    from ds_trainer.arguments.recipe import Recipe
    from ds_trainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments
    from ds_trainer.callbacks.defaults import DefaultFlowCallback, PrinterCallback, ProgressCallback
    from ds_trainer.callbacks.early_stopping import EarlyStoppingCallback
    from ds_trainer.callbacks.protocol import TrainerCallback
    from ds_trainer.callbacks.records import RecordsCallback
    from ds_trainer.callbacks.state import TrainerControl, TrainerState
    from ds_trainer.config.compiled import CompiledConfig
    from ds_trainer.config.compiler import compile_config
    from ds_trainer.config.environment import Environment
    from ds_trainer.data.collators import default_data_collator
    from ds_trainer.parallel.attention import attention
    from ds_trainer.parallel.layout import ParallelLayout
    from ds_trainer.planner.model_shape import ModelShape
    from ds_trainer.training.evaluation.outputs import EvalLoopOutput, EvalPrediction, PredictionOutput
    from ds_trainer.training.loading.pretrained import from_pretrained
    from ds_trainer.training.search.best_run import BestRun, HPSearchBackend
    from ds_trainer.training.search.objective import default_compute_objective
    from ds_trainer.training.search.spaces import default_hp_space_optuna, default_hp_space_ray, default_hp_space_wandb
    from ds_trainer.training.seq2seq_trainer import Seq2SeqTrainer
    from ds_trainer.training.stopping.stopper import TrainingStopped
    from ds_trainer.training.tf_trainer import KerasModule, TFTrainer
    from ds_trainer.training.train_loop import TrainOutput
    from ds_trainer.training.trainer import Trainer
    from ds_trainer.utils.errors import ConfigError
    from ds_trainer.utils.failures import PeerFailure


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ds_trainer' has no attribute '{name}'")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
