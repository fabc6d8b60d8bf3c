"""ds_trainer: a DeepSpeed-first framework for training large models.

Public names are handed out lazily: ``import ds_trainer`` imports neither torch nor deepspeed, so that a command line
can check a recipe and print an error within a second.
"""

from __future__ import annotations

from importlib import import_module
from os import environ
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "BestRun": "ds_trainer.training.search.objective",
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
    "HPSearchBackend": "ds_trainer.training.search.objective",
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
    "Recipe": "ds_trainer.recipes.recipe",
    "MetricsFileCallback": "ds_trainer.callbacks.metrics_recorder",
    "SaveStrategy": "ds_trainer.arguments.enums",
    "SchedulerType": "ds_trainer.arguments.enums",
    "Seq2SeqTrainer": "ds_trainer.training.seq2seq_trainer",
    "Seq2SeqTrainingArguments": "ds_trainer.arguments.seq2seq_training_arguments",
    "TFTrainer": "ds_trainer.training.tf_trainer",
    "TFTrainingArguments": "ds_trainer.arguments.tf_training_arguments",
    "TrainOutput": "ds_trainer.training.train_loop",
    "Trainer": "ds_trainer.training.trainer",
    "TrainerCallback": "ds_trainer.callbacks.protocol",
    "TrainerControl": "ds_trainer.callbacks.state",
    "TrainerState": "ds_trainer.callbacks.state",
    "TrainingStopped": "ds_trainer.training.stopping.stop_controller",
    "TrainingArguments": "ds_trainer.arguments.training_arguments",
    "attention": "ds_trainer.parallel.attention",
    "compile_config": "ds_trainer.config.compiler",
    "default_compute_objective": "ds_trainer.training.search.objective",
    "default_data_collator": "ds_trainer.data.collators",
    "default_hp_space_optuna": "ds_trainer.training.search.objective",
    "default_hp_space_ray": "ds_trainer.training.search.objective",
    "default_hp_space_wandb": "ds_trainer.training.search.objective",
    "from_pretrained": "ds_trainer.training.loading.pretrained",
    "replay": "ds_trainer.monitor.health.replay",
    "set_seed": "ds_trainer.utils.seeds",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:  # "as": type checkers take it as public; a test compares it with _PUBLIC
    from transformers import DataCollatorForLanguageModeling as DataCollatorForLanguageModeling
    from transformers import DataCollatorForSeq2Seq as DataCollatorForSeq2Seq
    from transformers import DataCollatorForTokenClassification as DataCollatorForTokenClassification
    from transformers import DataCollatorWithFlattening as DataCollatorWithFlattening
    from transformers import DataCollatorWithPadding as DataCollatorWithPadding

    from ds_trainer.arguments.enums import HubStrategy as HubStrategy
    from ds_trainer.arguments.enums import IntervalStrategy as IntervalStrategy
    from ds_trainer.arguments.enums import OptimizerNames as OptimizerNames
    from ds_trainer.arguments.enums import SaveStrategy as SaveStrategy
    from ds_trainer.arguments.enums import SchedulerType as SchedulerType
    from ds_trainer.arguments.parser import HfArg as HfArg
    from ds_trainer.arguments.parser import HfArgumentParser as HfArgumentParser
    from ds_trainer.arguments.seq2seq_training_arguments import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
    from ds_trainer.arguments.tf_training_arguments import TFTrainingArguments as TFTrainingArguments
    from ds_trainer.arguments.training_arguments import TrainingArguments as TrainingArguments
    from ds_trainer.callbacks.defaults import DefaultFlowCallback as DefaultFlowCallback
    from ds_trainer.callbacks.defaults import PrinterCallback as PrinterCallback
    from ds_trainer.callbacks.defaults import ProgressCallback as ProgressCallback
    from ds_trainer.callbacks.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
    from ds_trainer.callbacks.metrics_recorder import MetricsFileCallback as MetricsFileCallback
    from ds_trainer.callbacks.protocol import TrainerCallback as TrainerCallback
    from ds_trainer.callbacks.state import TrainerControl as TrainerControl
    from ds_trainer.callbacks.state import TrainerState as TrainerState
    from ds_trainer.config.compiled import CompiledConfig as CompiledConfig
    from ds_trainer.config.compiler import compile_config as compile_config
    from ds_trainer.config.environment import Environment as Environment
    from ds_trainer.data.collators import DefaultDataCollator as DefaultDataCollator
    from ds_trainer.data.collators import default_data_collator as default_data_collator
    from ds_trainer.monitor.health.replay import replay as replay
    from ds_trainer.parallel.attention import attention as attention
    from ds_trainer.parallel.layout import ParallelLayout as ParallelLayout
    from ds_trainer.planner.model_shape import ModelShape as ModelShape
    from ds_trainer.recipes.recipe import Recipe as Recipe
    from ds_trainer.training.evaluation.outputs import EvalLoopOutput as EvalLoopOutput
    from ds_trainer.training.evaluation.outputs import EvalPrediction as EvalPrediction
    from ds_trainer.training.evaluation.outputs import PredictionOutput as PredictionOutput
    from ds_trainer.training.loading.pretrained import from_pretrained as from_pretrained
    from ds_trainer.training.search.objective import BestRun as BestRun
    from ds_trainer.training.search.objective import HPSearchBackend as HPSearchBackend
    from ds_trainer.training.search.objective import default_compute_objective as default_compute_objective
    from ds_trainer.training.search.objective import default_hp_space_optuna as default_hp_space_optuna
    from ds_trainer.training.search.objective import default_hp_space_ray as default_hp_space_ray
    from ds_trainer.training.search.objective import default_hp_space_wandb as default_hp_space_wandb
    from ds_trainer.training.seq2seq_trainer import Seq2SeqTrainer as Seq2SeqTrainer
    from ds_trainer.training.stopping.stop_controller import TrainingStopped as TrainingStopped
    from ds_trainer.training.tf_trainer import KerasModule as KerasModule
    from ds_trainer.training.tf_trainer import TFTrainer as TFTrainer
    from ds_trainer.training.train_loop import TrainOutput as TrainOutput
    from ds_trainer.training.trainer import Trainer as Trainer
    from ds_trainer.utils.errors import ConfigError as ConfigError
    from ds_trainer.utils.failures import PeerFailure as PeerFailure
    from ds_trainer.utils.seeds import set_seed as set_seed

if "TORCHELASTIC_ERROR_FILE" in environ:  # a rank of torchrun, of which an earlier attempt may have been the last
    import_module("ds_trainer.utils.torchrun_attempts").follow_attempts()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ds_trainer' has no attribute '{name}'")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
