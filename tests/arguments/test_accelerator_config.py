"""``accelerator_config`` in every form, and what its fields do."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_trainer import ConfigError, HfArgumentParser, TrainingArguments
from ds_trainer.arguments.accelerator_config import EFFECTS, AcceleratorConfig, replica_batch_size, split_problems

GIVEN = {"even_batches": False, "use_configured_state": True, "gradient_accumulation_kwargs": {"sync_each_batch": True}}


def arguments(**values: Any) -> TrainingArguments:
    return TrainingArguments("out", use_cpu=True, **values)


@dataclass
class OfAScript:
    even_batches: bool = False
    use_configured_state: bool = True
    gradient_accumulation_kwargs: dict[str, Any] = field(default_factory=lambda: {"sync_each_batch": True})

    def a_method(self) -> None: ...


class Plain:
    even_batches = False
    use_configured_state = True
    gradient_accumulation_kwargs = {"sync_each_batch": True}  # noqa: RUF012


def forms(folder: Path) -> dict[str, Any]:
    import transformers
    from transformers.trainer_pt_utils import AcceleratorConfig as Reference

    assert transformers.TrainingArguments
    (folder / "a.json").write_text(json.dumps(GIVEN))
    (folder / "a.yaml").write_text(
        "even_batches: false\nuse_configured_state: true\ngradient_accumulation_kwargs:\n  sync_each_batch: true\n"
    )
    return {
        "mapping": GIVEN,
        "JSON": json.dumps(GIVEN),
        "JSON file": str(folder / "a.json"),
        "YAML file": folder / "a.yaml",
        "namespace": SimpleNamespace(**GIVEN),
        "dataclass": OfAScript(),
        "instance": Plain(),
        "class": Plain,
        "transformers": Reference(**GIVEN),
        "ours": AcceleratorConfig(**GIVEN),
    }


@pytest.mark.parametrize(
    "form",
    [
        "mapping",
        "JSON",
        "JSON file",
        "YAML file",
        "namespace",
        "dataclass",
        "instance",
        "class",
        "transformers",
        "ours",
    ],
)
def test_every_form_is_read(form: str, tmp_path: Path) -> None:
    value = forms(tmp_path)[form]
    args = arguments(accelerator_config=value)
    assert args.accelerator_config == AcceleratorConfig(**GIVEN)
    assert args.accelerator_config.split_batches is False  # a field that was not given
    args.complete()
    assert args.accelerator_config == AcceleratorConfig(**GIVEN)
    assert args.to_dict()["accelerator_config"] == {**AcceleratorConfig().to_dict(), **GIVEN}
    json.loads(args.to_json_string())


def test_names_and_defaults_are_those_of_transformers() -> None:
    from transformers.trainer_pt_utils import AcceleratorConfig as Reference

    assert AcceleratorConfig().to_dict() == Reference().to_dict()
    assert list(EFFECTS) == list(AcceleratorConfig().to_dict())
    assert arguments().accelerator_config == AcceleratorConfig()


def test_the_command_line_takes_text_and_files(tmp_path: Path) -> None:
    for given in (json.dumps(GIVEN), str(forms(tmp_path)["YAML file"])):
        argv = ["--output_dir", "o", "--accelerator_config", given]
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(argv, look_for_args_file=False)
        assert args.accelerator_config == AcceleratorConfig(**GIVEN)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"split_batch": True}, "accelerator_config: unknown key 'split_batch'. Did you mean 'split_batches'?"),
        (SimpleNamespace(evn_batches=True), "unknown key 'evn_batches'. Did you mean 'even_batches'?"),
        ({"even_batches": "perhaps"}, "accelerator_config: even_batches='perhaps': expected bool"),
        ("{broken", "is not valid JSON"),
        ("nowhere.json", "accelerator_config='nowhere.json' does not exist"),
        (3, "accelerator_config=3 is neither an object"),
        ([1], "accelerator_config=[1] is neither an object"),
        ({"gradient_accumulation_kwargs": {"steps": 2}}, "gradient_accumulation_kwargs: unknown key 'steps'"),
        ({"gradient_accumulation_kwargs": {"num_steps": 0}}, "num_steps=0 must be a positive integer"),
        ({"gradient_accumulation_kwargs": {"num_steps": "two"}}, "num_steps='two': expected int"),
    ],
)
def test_wrong_values_are_named(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        arguments(accelerator_config=value)
    assert len(error.value.problems) == 1 and message in error.value.problems[0]


def test_wrong_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for text, message in (("- 1\n", "the file must be a mapping"), ("a: [\n", "a.yaml:2: not valid YAML")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            arguments(accelerator_config=path)
    path.write_text("even_batches: 3\n")
    with pytest.raises(ConfigError, match=r"a\.yaml': even_batches=3: expected bool"):
        arguments(accelerator_config=path)


def test_num_steps_is_gradient_accumulation_steps() -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    args = arguments(accelerator_config=config)
    assert args.gradient_accumulation_steps == 4 and args.given("gradient_accumulation_steps")
    assert config == {"gradient_accumulation_kwargs": {"num_steps": 4}}
    args.change(gradient_accumulation_steps=2)  # it was applied once
    assert args.gradient_accumulation_steps == 2
    assert arguments(accelerator_config=config, gradient_accumulation_steps=4).gradient_accumulation_steps == 4
    with pytest.raises(ConfigError, match=r"num_steps=4 .* contradicts gradient_accumulation_steps=2; keep only"):
        arguments(accelerator_config=config, gradient_accumulation_steps=2)


def test_split_batches_divides_the_batch() -> None:
    args = arguments(accelerator_config={"split_batches": True}, per_device_train_batch_size=12)
    assert [replica_batch_size(args, "per_device_train_batch_size", dp) for dp in (1, 2, 4)] == [12, 6, 3]
    assert replica_batch_size(args, "per_device_eval_batch_size", 2) == 4
    plain = arguments()
    assert replica_batch_size(plain, "per_device_train_batch_size", 2) == 8
    plain.accelerator_config = {"split_batches": True}
    assert replica_batch_size(plain, "per_device_train_batch_size", 2) == 4
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size=12 cannot be divided by 5 .* a multiple of 5"):
        replica_batch_size(args, "per_device_train_batch_size", 5)
    with pytest.raises(ConfigError, match="split_batches=True fixes the batch of all replicas"):
        args.change(auto_find_batch_size=True)


def test_the_batch_of_an_evaluation_is_checked_where_there_is_one() -> None:
    split = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 12}
    assert split_problems(arguments(**split), 3) == []  # its default of 8 is not in use
    for evaluation in ({"eval_strategy": "epoch"}, {"do_eval": True}, {"per_device_eval_batch_size": 8}):
        (problem,) = split_problems(arguments(**split, **evaluation), 3)
        assert "per_device_eval_batch_size=8 cannot be divided by 3" in problem
    (problem,) = split_problems(arguments(**split), 5)
    assert "per_device_train_batch_size=12" in problem


def test_split_batches_of_transformers_4() -> None:
    with pytest.warns(FutureWarning, match="split_batches"):
        assert arguments(split_batches=True).accelerator_config.split_batches is True
