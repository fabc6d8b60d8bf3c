"""Recipes: one YAML file that names the model, the data and the arguments of a training run.

::

    model:                      # path or architecture
      path: DIR                 #   a local directory with config.json and weights, or a name on the Hub
      architecture: {...}       #   a transformers config (model_type: llama, hidden_size: ...); random weights
      auto_class: NAME          #   transformers class; default: AutoModelForCausalLM
      dtype: NAME               #   type of the weights; default: float32
      peft: {...}               #   a PEFT config (peft_type: LORA, r: 16 ...): only the adapters are trained
      freeze: [NAME]            #   parts that are not trained: vision_tower, projector, language_model, or patterns
    data:        {...}          # DataSpec, or a list of training data
    arguments:   {...}          # fields of TrainingArguments
    report:      {...}          # ReportSpec
    task:        NAME           # TaskSpec: sft (the default), vision_language, dpo, reward, classification or embedding
    distillation: {...}         # DistillationSpec: a teacher

Any value can be overridden on the command line: ``--arguments.max_steps 20`` or ``--data.train=[a.txt,b.txt]``. Paths
are relative to the working directory. This module opens neither the model nor the data, so a recipe may be valid even
if its files do not exist.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_trainer.arguments.checks.value_checks import length_problems
from ds_trainer.arguments.compat.renamed_arguments import RENAMED, name_as_given
from ds_trainer.arguments.construction import file_problems
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.arguments.typed import WrongType, read_as
from ds_trainer.arguments.yaml_reader import Located, read_command_line_value, read_yaml
from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.named_files import named_file_problems
from ds_trainer.recipes.task import DistillationSpec, TaskSpec, complete_short_forms
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import read_user_file, shortened
from ds_trainer.utils.units import parse_tokens


@dataclass(frozen=True)
class ModelSpec:
    """The model: a directory or Hub name, or an architecture with random weights.

    Attributes:
        path: directory or Hub name.
        architecture: fields of a transformers config.
        auto_class: name of the transformers class; default: AutoModelForCausalLM.
        dtype: type of the weights before the engine converts them; default: float32.
        peft: fields of a PEFT config: adapters are added to the model, and only they are trained.
        quantization: fields of transformers' BitsAndBytesConfig, such as ``load_in_4bit: true``: the base is quantized
            when it is loaded, and ``peft`` is trained on it (QLoRA).
        freeze: parameters that are not trained: the parts ``vision_tower``, ``projector`` and ``language_model`` of a
            vision-language model, or patterns of parameter names such as ``*.layers.0.*``.
    """

    path: str | None = None
    architecture: dict[str, Any] | None = None
    auto_class: str | None = None
    dtype: str | None = None
    peft: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    freeze: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """What cannot work, as one sentence per problem."""
        if (self.path is None) == (self.architecture is None):
            state = "both are given" if self.path is not None else "neither is given"
            return [f"model: give either 'path' or 'architecture', but {state}."]
        if self.architecture is not None and not isinstance(self.architecture.get("model_type"), str):
            return ["model.architecture: 'model_type' is missing; name a transformers model type such as llama."]
        if self.peft is not None and not isinstance(self.peft.get("peft_type"), str):
            return ["model.peft: 'peft_type' is missing; name a PEFT method such as LORA."]
        if self.quantization is not None and (self.peft is None or self.path is None):
            return [
                "model.quantization: quantized weights cannot be trained; give model.path, and adapters as model.peft."
            ]
        return []


@dataclass(frozen=True)
class ReportSpec:
    """The report after training.

    Attributes:
        compression_baselines: compare the model with gzip -9 and xz -9 on the evaluation text.
        sample_prompt: prompt of the generated sample.
        sample_tokens: length of the generated sample; 0: no sample.
        sample_temperature: 0: greedy decoding.
    """

    compression_baselines: bool = True
    sample_prompt: str = ""
    sample_tokens: int = 200
    sample_temperature: float = 0.8

    def problems(self) -> list[str]:
        """What cannot work, as one sentence per problem."""
        return [
            f"report.{name}={getattr(self, name)} must not be negative."
            for name in ("sample_tokens", "sample_temperature")
            if not getattr(self, name) >= 0
        ]


@dataclass(frozen=True)
class Recipe:
    """A complete recipe.

    ``arguments`` has only the fields that were given; :meth:`training_arguments` adds the defaults. ``origins`` maps
    the dotted name of every given key to its source.
    """

    model: ModelSpec
    data: DataSpec
    arguments: dict[str, Any] = field(default_factory=dict)
    report: ReportSpec = ReportSpec()
    task: TaskSpec = field(default_factory=TaskSpec)
    distillation: DistillationSpec | None = None
    path: str = ""
    origins: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def where(self, key: str) -> str:
        """The source of the value of a dotted ``key``: ``file:line``, ``command line``, or the recipe file."""
        return self.origins.get(key, self.path or "the recipe")

    @property
    def fine_tunes(self) -> bool:
        """Whether samples of different lengths are trained on, not blocks of text."""
        return self.data.fine_tunes(self.arguments)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of a sample, or the most of one."""
        if not self.fine_tunes:
            return self.data.sequence_length
        length = self.arguments.get("max_length") if self.data.max_length is None else self.data.max_length
        return parse_tokens(length) if isinstance(length, str) else int(length or 0)

    def training_arguments(self) -> TrainingArguments:
        """The recipe's arguments, with defaults for all others."""
        given = self.data.max_length
        length = {} if given is None or any(length_problems(given)) else {"max_length": given}
        args = TrainingArguments(**{**length, **self.arguments})
        prefix = "arguments."
        sources = {key.removeprefix(prefix): source for key, source in self.origins.items() if key.startswith(prefix)}
        for name in list(args.origins):
            given = name_as_given(name, self.arguments)
            if given is not None:
                args.origins[name] = sources.get(given, args.origins[name])
        # The line of every key of a DeepSpeed configuration inside the recipe.
        args.origins.update({key: source for key, source in sources.items() if "." in key})
        return args

    def to_dict(self) -> dict[str, Any]:
        """The sections as plain values, ready for JSON."""
        return {section: dataclasses.asdict(self)[section] for section in SECTIONS}


SECTIONS: dict[str, type] = {
    "model": ModelSpec,
    "task": TaskSpec,
    "data": DataSpec,
    "arguments": TrainingArguments,
    "report": ReportSpec,
    "distillation": DistillationSpec,
}


_MOST_SUGGESTIONS = 100


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = (), runs: bool = False) -> Recipe:
    """Read the recipe ``path`` and apply ``overrides`` (arguments ``--a.b value`` or ``--a.b=value``).

    If it ``runs`` here, an error lists the problems of the files that it names, too.

    Raises:
        ConfigError: the file cannot be read, or a value in it or in ``overrides`` cannot work; lists all problems, each
            with its source (``file:line`` or ``command line``).
    """
    name = os.fspath(path)
    root, problems = read_yaml(read_user_file(name, f"The recipe {name!r}", "YAML file"), name)
    if not isinstance(root.value, dict):
        raise ConfigError(f"{root.where}: a recipe is a mapping with the sections {', '.join(SECTIONS)}.")
    complete_short_forms(root.value)
    data = root.value.get("data")
    if data is not None and isinstance(data.value, list):
        root.value["data"] = Located({"train": data}, data.where)
    problems += _apply_overrides(root.value, overrides)

    for key, section in root.value.items():
        if key not in SECTIONS:
            problems.append(_unknown_key(section.where, key, "", SECTIONS, len(problems)))
    values: dict[str, dict[str, Any]] = {}
    readable = set()  # sections without a wrong key or type, which would cause further problems
    for key in SECTIONS:
        before = len(problems)
        values[key] = _read_section(key, root.value.get(key), problems)
        if len(problems) == before:
            readable.add(key)

    model, data, report = ModelSpec(**values["model"]), DataSpec(**values["data"]), ReportSpec(**values["report"])
    for key, sentences in (
        ("model", model.problems()),
        ("data", data.problems(values["arguments"]) if "data" in readable else []),
        ("report", report.problems()),
    ):
        problems += [f"{name}: {problem}" for problem in sentences if key in readable]
    origins = dict(_origins(root.value, ""))
    task = TaskSpec(**values["task"])
    if {"task", "arguments"} <= readable:
        problems += [
            f"{name}: {problem}" for problem in task.problems(values["data"], values["arguments"], model.freeze)
        ]
    distillation = DistillationSpec(**values["distillation"]) if "distillation" in root.value else None
    if distillation is not None and {"task", "distillation"} <= readable:
        problems += [f"{name}: {problem}" for problem in distillation.problems(task.name)]
    recipe = Recipe(model, data, values["arguments"], report, task, distillation, path=name, origins=origins)
    try:
        recipe.training_arguments()
    except ConfigError as error:
        of_file = file_problems(values["arguments"])  # without its lines
        further = [problem for problem in error.problems if problem not in of_file]
        problems += [_with_source(problem, root.value.get("arguments"), name) for problem in further]
    if problems:
        arguments = root.value.get("arguments")
        written = arguments.value if arguments is not None and isinstance(arguments.value, dict) else {}
        named = named_file_problems(recipe) if runs and {"model", "data", "distillation"} <= readable else ()
        raise ConfigError([*problems, *file_problems(written), *named])
    return recipe


def _apply_overrides(root: dict[str, Located], args: Sequence[str]) -> list[str]:
    """Set the values of the command line in the tree ``root``; returns the problems."""
    problems = []
    position = 0
    while position < len(args):
        arg = args[position]
        position += 1
        if not arg.startswith("--") or arg == "--":
            problems.append(f"command line: {arg!r} is not understood; write --section.key value.")
            continue
        key, equals, text = arg[2:].partition("=")
        if not equals:
            if position == len(args) or args[position].startswith("--"):
                problems.append(f"command line: --{key} needs a value: --{key} VALUE (or --{key}=VALUE).")
                continue
            text = args[position]
            position += 1
        problems += _set(root, key, text)
    return problems


def _set(root: dict[str, Located], dotted: str, text: str) -> list[str]:
    keys = dotted.split(".")
    if keys[0] not in SECTIONS:
        full_names = [f"--{section}.{name}" for section, spec in SECTIONS.items() for name in _hints(spec)]
        same_name = [full for full in full_names if full.endswith(f".{dotted}")]
        hint = f" Did you mean '{same_name[0]}'?" if same_name else did_you_mean(f"--{dotted}", full_names)
        return [f"command line: unknown key '--{dotted}'.{hint or _valid(SECTIONS)}"]
    if len(keys) == 1:
        return [f"command line: '{dotted}' is a section; set one of its keys, as in --{dotted}.KEY VALUE."]
    section = root
    for depth, key in enumerate(keys[:-1], 1):
        entry = section.get(key)
        if entry is None or entry.value is None:
            entry = section[key] = Located({}, "command line")
        if not isinstance(entry.value, dict):
            above = ".".join(keys[:depth])
            return [f"command line: '--{dotted}' cannot be set, because {above} is {entry.plain()!r} ({entry.where})."]
        section = entry.value
    section[keys[-1]] = read_command_line_value(text)
    return []


def _read_section(section: str, located: Located | None, problems: list[str]) -> dict[str, Any]:
    """The fields of one section, converted to their types; errors are appended to ``problems``."""
    if located is None or located.value is None:
        return {}
    if not isinstance(located.value, dict):
        problems.append(f"{located.where}: {section} must be a mapping, got {located.plain()!r}.")
        return {}
    hints = _hints(SECTIONS[section])
    if section == "arguments":
        hints = {**{old: row.hint for old, row in RENAMED.items()}, **hints}
    values: dict[str, Any] = {}
    for key, entry in located.value.items():
        if key not in hints:
            problems.append(_unknown_key(entry.where, key, section, hints, len(problems)))
            continue
        if section == "data" and key in ("train", "eval"):
            values[key] = _read_sources(entry, f"data.{key}", problems)
            continue
        try:
            values[key] = read_as(entry, hints[key])
        except WrongType as error:
            problems.append(f"{entry.where}: {section}.{key}: {error}.")
    return values


def _read_sources(located: Located, name: str, problems: list[str]) -> tuple[str | SourceSpec, ...]:
    """The entries of ``data.train`` or ``data.eval``: paths, or mappings with the keys of a source."""
    entries = located.value if isinstance(located.value, list) else [located]
    hints = _hints(SourceSpec)
    sources: list[str | SourceSpec] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry.value, dict):
            try:
                sources.append(read_as(entry, str))
            except WrongType as error:
                problems.append(f"{entry.where}: {name}: {error}.")
            continue
        values = {}
        for key, value in entry.value.items():
            if key not in hints:
                problems.append(
                    f"{value.where}: unknown key '{name}[{index}].{key}'.{did_you_mean(key, hints) or _valid(hints)}"
                )
                continue
            try:
                values[key] = read_as(value, hints[key])
            except WrongType as error:
                problems.append(f"{value.where}: {name}[{index}].{key}: {error}.")
        sources.append(SourceSpec(**values))
    return tuple(sources)


def _origins(entries: dict[str, Located], above: str) -> typing.Iterator[tuple[str, str]]:
    """``(dotted key, source)`` of every entry below the prefix ``above``."""
    for key, entry in entries.items():
        yield above + key, entry.where
        if isinstance(entry.value, dict):
            yield from _origins(entry.value, f"{above}{key}.")
        for index, part in enumerate(entry.value if isinstance(entry.value, list) else []):
            yield from _origins({f"{key}[{index}]": part}, above) if isinstance(part.value, dict) else ()


@functools.cache
def _hints(spec: type) -> dict[str, Any]:
    """Type hints of the fields of a dataclass, in order of definition."""
    hints = typing.get_type_hints(spec)
    return {item.name: hints[item.name] for item in dataclasses.fields(spec)}


def _unknown_key(where: str, key: str, section: str, valid: typing.Iterable[str], before: int) -> str:
    """The problem; without a suggestion, which takes time, if there are many ``before``."""
    valid = list(valid)
    full = shortened(f"{section}.{key}" if section else key)
    if before >= _MOST_SUGGESTIONS:
        return f"{where}: unknown key '{full}'."
    elsewhere = [other for other, spec in SECTIONS.items() if other != section and key in _hints(spec)]
    hint = did_you_mean(key, valid)
    if not hint and elsewhere:
        hint = f" It belongs in the section '{elsewhere[0]}'."
    return f"{where}: unknown key '{full}'.{hint or _valid(valid)}"


def _valid(names: typing.Iterable[str]) -> str:
    names = list(names)
    listed = ", ".join(names) if len(names) <= 12 else f"the {len(names)} fields of TrainingArguments"
    return f" Valid keys: {listed}."


def _with_source(problem: str, arguments: Located | None, name: str) -> str:
    """``problem`` of TrainingArguments (``field=value ...``) with the source of that field."""
    match = re.match(r"(\w+)=", problem)
    values = arguments.value if arguments is not None and isinstance(arguments.value, dict) else {}
    key = name_as_given(match.group(1), {name: entry.plain() for name, entry in values.items()}) if match else None
    where = values[key].where if key is not None else name
    return f"{where}: arguments: {problem}"
