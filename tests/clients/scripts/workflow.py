"""What the scripts for transformers' Trainer have in common: arguments, a resumed run, results in files."""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import transformers
from assets import report, seeded
from transformers import HfArgumentParser, set_seed
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model is trained."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "folder of a saved model; new weights without"}
    )


def parse(*types) -> tuple:
    """The command line, or one JSON file, as objects of ``types``; the last is a class of TrainingArguments."""
    parser = HfArgumentParser(types)
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        parsed = parser.parse_json_file(json_file=sys.argv[1])
    else:
        parsed = parser.parse_args_into_dataclasses()
    args = parsed[-1]
    logging.basicConfig(level=logging.WARNING, handlers=[logging.StreamHandler(sys.stderr)])
    transformers.utils.logging.set_verbosity(args.get_process_log_level())
    logger.warning(
        "rank %s of %s on %s, %s devices, distributed: %s, 16 bits: %s",
        args.process_index,
        args.world_size,
        args.device,
        args.n_gpu,
        args.parallel_mode.value == "distributed",
        args.fp16,
    )
    set_seed(args.seed)
    return parsed


def model_of(model_args: ModelArguments, kind, config):
    """The saved model that the command line names, or one of class ``kind`` with new weights."""
    if model_args.model_name_or_path:
        return kind.from_pretrained(model_args.model_name_or_path)
    return seeded(kind, config)


def preprocessed(args, data, function, name: str):
    """``data.map(function)`` with only the new columns; the main process maps first."""
    with args.main_process_first(desc=f"preprocessing of {name}"):
        return data.map(function, batched=True, remove_columns=data.column_names, desc=f"Preprocessing {name}")


def train(trainer, args) -> None:
    """Train, or continue from the newest checkpoint of the output directory; save the model and the results."""
    newest = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or newest)
    trainer.save_model()
    record(trainer, "train", result.metrics, len(trainer.train_dataset))
    trainer.save_state()


def record(trainer, split: str, metrics: dict[str, float], samples: int) -> dict[str, float]:
    """Print ``metrics`` and write them to a file, with the number of samples."""
    metrics[f"{split}_samples"] = samples
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)
    return metrics


def run(trainer, args, evaluate=None, predict=None) -> None:
    """The parts that the command line requests, and the report.

    ``evaluate()`` and ``predict()`` return metrics; without them the methods of ``trainer`` are called.
    """
    found = {}
    if args.do_train:
        train(trainer, args)
    if args.do_eval:
        metrics = evaluate() if evaluate else trainer.evaluate(metric_key_prefix="eval")
        found["evaluation"] = record(trainer, "eval", metrics, len(trainer.eval_dataset))
    if args.do_predict:
        found["prediction"] = record(trainer, "predict", predict(), len(trainer.eval_dataset))
    trainer.create_model_card(finetuned_from="a new model", tags="test")
    report(trainer, **found)
