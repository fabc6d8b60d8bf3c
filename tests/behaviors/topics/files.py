"""Files of the output directory and of checkpoints."""

from __future__ import annotations

import json
from typing import Any

import safetensors.torch
import torch

from tests.behaviors.api import Api
from tests.support.models import tiny_llama

_OURS = {"ds_config.json", "metrics.jsonl", "run_history.jsonl", "report.html", "report.json"}


def _saved_run(api: Api) -> Any:
    trainer = api.text_trainer({"save_strategy": "steps", "save_steps": 2})
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return trainer, api.directory


def checkpoints(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    return sorted(path.name for path in directory.glob("checkpoint-*"))


def names_of_a_checkpoint(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    return sorted(path.name for path in (directory / "checkpoint-2").iterdir())


def model_files_of_a_checkpoint(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    wanted = {"config.json", "generation_config.json", "model.safetensors", "trainer_state.json"}
    return sorted(wanted & {path.name for path in (directory / "checkpoint-2").iterdir()})


def optimizer_files_of_a_checkpoint(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    wanted = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    return sorted(wanted & {path.name for path in (directory / "checkpoint-2").iterdir()})


def names_of_the_output_directory(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    return sorted({path.name for path in directory.iterdir()} - _OURS)


def training_args_bin(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    args = torch.load(directory / "training_args.bin", weights_only=False)
    return [type(args).__name__, args.learning_rate, args.save_steps]


def weights_of_a_checkpoint(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    found = safetensors.torch.load_file(directory / "checkpoint-4" / "model.safetensors")
    return {name: float(tensor.double().sum()) for name, tensor in found.items()}


def metadata_of_the_weights(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    with safetensors.safe_open(directory / "model.safetensors", "pt") as file:
        return file.metadata()


def configuration_of_the_model(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    values = json.loads((directory / "config.json").read_text())
    return {name: values.get(name) for name in ("architectures", "model_type", "use_cache", "hidden_size", "dtype")}


def saved_model_loads(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    model = type(tiny_llama()).from_pretrained(directory / "checkpoint-4")
    return float(sum(parameter.double().sum() for parameter in model.parameters()))


def get_last_checkpoint(api: Api) -> Any:
    from transformers.trainer_utils import get_last_checkpoint as last

    _, directory = api.shared(_saved_run)
    found = last(str(directory))
    return found and found.rpartition("/")[2]


def scheduler_file(api: Api) -> Any:
    _, directory = api.shared(_saved_run)
    state = torch.load(directory / "checkpoint-2" / "scheduler.pt", weights_only=True)
    return [state["last_epoch"], state["_last_lr"]]


def total_limit(api: Api) -> Any:
    api.plain_trainer({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}).train()
    return [name for name in api.files() if name.startswith("checkpoint")]


def total_limit_keeps_the_best(api: Api) -> Any:
    return _kept_with_the_best(api, 2)


def total_limit_of_one_keeps_the_best(api: Api) -> Any:
    return _kept_with_the_best(api, 1)


def _kept_with_the_best(api: Api, limit: int) -> Any:
    values = iter([0.9, 0.2, 0.3, 0.1])
    changes = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_total_limit": limit,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
    }
    api.evaluated_trainer(changes, compute_metrics=lambda prediction: {"accuracy": next(values)}).train()
    return [name for name in api.files() if name.startswith("checkpoint")]


def best_strategy(api: Api) -> Any:
    values = iter([0.5, 0.7, 0.6, 0.8])
    changes = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "accuracy"}
    api.evaluated_trainer(changes, compute_metrics=lambda prediction: {"accuracy": next(values)}).train()
    return [name for name in api.files() if name.startswith("checkpoint")]


def best_model_is_loaded(api: Api) -> Any:
    values = iter([0.9, 0.2, 0.3, 0.1])
    changes = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
    }
    trainer = api.evaluated_trainer(changes, compute_metrics=lambda prediction: {"accuracy": next(values)})
    trainer.train()
    best = safetensors.torch.load_file(api.directory / "checkpoint-1" / "model.safetensors")
    held = trainer.model.state_dict()
    return [all(torch.equal(held[name].cpu(), tensor) for name, tensor in best.items()), trainer.state.best_metric]


def save_only_model(api: Api) -> Any:
    api.plain_trainer({"save_strategy": "steps", "save_steps": 2, "save_only_model": True}).train()
    names = set(api.files("checkpoint-2"))
    return [sorted(names & {"model.safetensors", "trainer_state.json"}), "optimizer.pt" in names]


def save_model_elsewhere(api: Api) -> Any:
    api.text_trainer().save_model(str(api.directory / "deep" / "model"))
    return [name for name in api.files("deep/model") if name != "training_args.bin"]


def save_model_of_a_plain_module(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.save_model()
    held = safetensors.torch.load_file(api.directory / "model.safetensors")
    return [[name for name in api.files() if name != "training_args.bin"], sorted(held)]


def tokenizer_is_saved(api: Api) -> Any:
    trainer = api.text_trainer(processing_class=_tokenizer())
    trainer.save_model()
    return [name for name in api.files() if "token" in name]


def tokenizer_of_the_collator_is_saved(api: Api) -> Any:
    trainer = api.text_trainer(data_collator=api.DataCollatorWithPadding(_tokenizer()))
    trainer.save_model()
    return [name for name in api.files() if "token" in name]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "[UNK]": 5}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")),
        pad_token="[PAD]",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="[UNK]",
    )


def state_dict_given_to_save(api: Api) -> Any:
    """As FastChat's and Alpaca's scripts save."""
    trainer = api.text_trainer()
    weights = {name: tensor.cpu() for name, tensor in trainer.model.state_dict().items()}
    trainer._save(str(api.directory / "given"), state_dict=weights)
    return [name for name in api.files("given") if name != "training_args.bin"]


def checkpoint_is_written_again(api: Api) -> Any:
    trainer = api.plain_trainer({"save_strategy": "steps", "save_steps": 2})
    trainer.train()
    trainer.train()
    return [name for name in api.files() if name.startswith("checkpoint")]
