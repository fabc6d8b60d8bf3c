"""Model cards and Hub arguments, without a connection."""

from __future__ import annotations

from typing import Any

import yaml

from tests.behaviors.api import Api, raised


def _card(api: Api, trainer: Any, **given: Any) -> tuple[dict[str, Any], str]:
    trainer.create_model_card(**given)
    text = (api.directory / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def names_in_a_card(api: Api) -> Any:
    trainer = api.text_trainer()
    trainer.train()
    front, body = _card(api, trainer, model_name="my-model", tags="mine", language="en", license="mit")
    return [front["language"], front["license"], "mine" in front["tags"], "# my-model" in body]


def results_in_a_card(api: Api) -> Any:
    trainer = api.text_trainer()
    trainer.train()
    trainer.evaluate()
    _, body = _card(api, trainer)
    headings = ("Training and evaluation data", "Training hyperparameters", "Training results", "Framework versions")
    return [heading in body for heading in headings]


def tasks_and_datasets_in_a_card(api: Api) -> Any:
    trainer = api.text_trainer()
    trainer.train()
    trainer.evaluate()
    given = {"tasks": "text-classification", "dataset_tags": "imdb", "dataset": "IMDB", "dataset_args": "plain"}
    front, _ = _card(api, trainer, **given, finetuned_from="base/model")
    return [front["base_model"], front["datasets"], front["model-index"][0]["name"] != ""]


def generated_from_trainer_tag(api: Api) -> Any:
    trainer = api.text_trainer()
    trainer.train()
    return "generated_from_trainer" in _card(api, trainer)[0]["tags"]


def card_is_not_written_by_save_model(api: Api) -> Any:
    api.text_trainer().save_model()
    return "README.md" in api.files()


def hub_arguments(api: Api) -> Any:
    args = api.arguments(hub_model_id="me/model", hub_strategy="checkpoint", hub_private_repo=True)
    return [args.hub_model_id, args.hub_strategy, args.hub_private_repo, args.push_to_hub]


def hub_strategies(api: Api) -> Any:
    return [api.arguments(hub_strategy=name).hub_strategy for name in ("end", "every_save", "all_checkpoints")]


def push_without_a_connection(api: Api) -> Any:
    return raised(api.plain_trainer().push_to_hub) != "nothing"
