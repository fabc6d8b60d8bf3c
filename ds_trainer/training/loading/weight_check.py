"""Compares the weights of a model with its files before training or evaluation.

The origin of the weights is recorded before an engine changes the model. A user who loads a whole model may change it
on purpose (merge adapters, resize embeddings), so a difference is a warning. Weights that the engine reads itself, or
that are sharded at construction (zero.Init), cannot have been changed, so a difference is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.enums import When
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.engine.loading.weight_source import WeightSource, attached_weight_source
from ds_trainer.engine.weights import without_adapters
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import user_path
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.checkpoint.loading.file_weights import FileWeights
    from ds_trainer.checkpoint.loading.verification import Verification
    from ds_trainer.engine.evaluation_engine import EvaluationEngine
    from ds_trainer.engine.training_engine import TrainingEngine

    Engine = TrainingEngine | EvaluationEngine

logger = get_logger(__name__)

_ATTRIBUTE = "_ds_trainer_weight_origin"


@dataclass(frozen=True)
class WeightOrigin:
    """The origin of the weights of a model.

    Attributes:
        name: directory or hub name.
        directory: the directory of the files; None if they are not on this machine.
        untouched: whether user code cannot have changed the weights since they were read.
        new: names of tensors that are in no file and are allowed to be new.
        key_mapping: renames the tensors of the files.
    """

    name: str
    directory: Path | None
    untouched: bool
    new: tuple[str, ...] = ()
    key_mapping: Mapping[str, str] | None = None


def note_origin(model: nn.Module) -> WeightOrigin | None:
    """Record and return the origin of the weights of ``model``; None if they are not from files or were trained.

    Call it before an engine takes the model; later calls return the same.
    """
    if not hasattr(model, _ATTRIBUTE):
        object.__setattr__(model, _ATTRIBUTE, _of_source(model) or _of_transformers(without_adapters(model)))
    origin: WeightOrigin | None = getattr(model, _ATTRIBUTE)
    return origin


def forget_origin(model: nn.Module) -> None:
    """Forget the origin, because training will change the weights."""
    object.__setattr__(model, _ATTRIBUTE, None)


def _of_source(model: nn.Module) -> WeightOrigin | None:
    """The origin if the engine reads the weights itself."""
    source = attached_weight_source(model)
    for files, before in _files_in(source) if source is not None else ():
        names = [name for name, _ in without_adapters(model).named_parameters(remove_duplicate=False)]
        new = tuple(name for name in names if any(other.has(name) for other in before))
        return WeightOrigin(str(files.directory), files.directory, True, new, files.key_mapping)
    return None


def _files_in(source: WeightSource) -> Iterator[tuple[FileWeights, list[WeightSource]]]:
    """The files that ``source`` reads, with the sources that take precedence over them."""
    from ds_trainer.checkpoint.loading.file_weights import FileWeights

    if isinstance(source, FileWeights):
        yield source, []
    parts: Sequence[WeightSource] = getattr(source, "sources", ())
    for number, part in enumerate(parts):
        yield from ((files, [*parts[:number], *before]) for files, before in _files_in(part))


def _of_transformers(model: Any) -> WeightOrigin | None:
    """The origin if ``from_pretrained`` loaded the model: it leaves its table of names on the model."""
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    if not name or "_weight_conversions" not in vars(model):
        return None
    untouched = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return WeightOrigin(str(name), _directory_of(str(name), getattr(model.config, "_commit_hash", None)), untouched)


def _directory_of(name: str, revision: str | None) -> Path | None:
    """The directory on this machine with the weight files of a directory or hub name, without network access."""
    from ds_trainer.checkpoint.loading.sampled_files import FILES, weight_files

    directory = user_path(name, f"The model {name!s}")
    if directory.is_dir():
        return directory if weight_files(directory) else None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        files = [try_to_load_from_cache(name, file, revision=revision) for file in FILES]
    except HFValidationError:  # a path that no longer exists
        return None
    return next((Path(path).parent for path in files if isinstance(path, str)), None)


class WeightCheck:
    """Compares weights with their files, and raises an error or warns if they differ.

    Attributes:
        result: the result of the last comparison; None if there was nothing to compare.
        summary: one line for the header; None if there is nothing to report.
    """

    def __init__(self) -> None:
        self.result: Verification | None = None
        self.summary: str | None = None

    def loaded(self, model: nn.Module, args: TrainingArguments, engine: Engine | None) -> None:
        """Compare the weights of ``model`` in its engine with their origin. Collective.

        Args:
            model: a model whose origin was recorded.
            args: has ``verify_weights`` and ``allow_new_weights``.
            engine: the engine of the model; None for a whole model without an engine.

        Raises:
            ConfigError: the weights differ from the files.
        """
        self.result = self.summary = None
        origin = note_origin(model)
        if origin is not None and args.verify_weights != When.NEVER:
            self._compare(model, origin, args, engine)

    def restarted(self, model: nn.Module, directory: Path, args: TrainingArguments, engine: TrainingEngine) -> None:
        """The same after the weights were loaded from ``directory`` (``start_from_weights``)."""
        from ds_trainer.checkpoint.loading.engine_weights import holds_shards

        self.result = self.summary = None
        # The shards of a checkpoint have checksums, which were verified when they were read.
        if args.verify_weights != When.NEVER and not holds_shards(directory):
            self._compare(model, WeightOrigin(str(directory), directory, untouched=True), args, engine)

    def _compare(
        self,
        model: nn.Module,
        origin: WeightOrigin,
        args: TrainingArguments,
        engine: Engine | None,
    ) -> None:
        from ds_trainer.checkpoint.loading.verification import verify_weights

        always = args.verify_weights == When.ALWAYS
        if any(distributed.agree(torch.tensor([int(origin.directory is None)]))):
            self.summary = f"not compared with {origin.name}: its files are not on every machine"
            if always:
                raise ConfigError(
                    f"verify_weights='always' ({args.where('verify_weights')}), but the files of {origin.name} are not "
                    "on every machine. Copy them there, or set verify_weights='auto'."
                )
            return
        assert origin.directory is not None
        allowed = args.allow_new_weights
        new = allowed if isinstance(allowed, bool) else [*origin.new, *allowed]
        self.result = verify_weights(model, origin.directory, engine, new, origin.key_mapping)
        self.summary = str(self.result)
        if self.result.good:
            return
        if always or origin.untouched:
            raise ConfigError(self.result.problems())
        logger.warning(
            "The weights of the model differ from its files. If that is intended, set verify_weights='never'; to "
            "make it an error, set verify_weights='always'. %s",
            " ".join(self.result.problems()),
        )
