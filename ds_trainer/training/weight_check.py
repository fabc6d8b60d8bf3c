"""Weights are compared with the files that they came from before anything is trained or evaluated.

What is compared is decided when the model is first seen, before an engine changes it: where its weights are from, and
whether anybody can have changed them on purpose. Who loads a whole model may merge adapters into it or resize its
embeddings: then a difference is worth a warning. Under zero.Init, or where the engine reads the files itself, nobody
can: then it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.enums import VerifyWeights
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.checkpoint.loading.file_weights import FileWeights
from ds_trainer.checkpoint.loading.held_weights import base_model
from ds_trainer.checkpoint.loading.sampled_files import FILES, weight_files
from ds_trainer.checkpoint.loading.verification import Verification, verify_weights
from ds_trainer.checkpoint.loading.weights_source import holds_pieces
from ds_trainer.engine.evaluation_engine import EvaluationEngine
from ds_trainer.engine.loading.weight_source import WeightSource, attached_weights
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

Engine = TrainingEngine | EvaluationEngine

_ATTRIBUTE = "_ds_trainer_weight_origin"


@dataclass(frozen=True)
class WeightOrigin:
    """Where the weights of a model are from.

    Attributes:
        name: directory or hub name.
        directory: of the files; None where they are not on this machine.
        untouched: nobody can have changed the weights since they were read.
        new: names of tensors that are in no file, as it was allowed.
        key_mapping: what renames the files' tensors.
    """

    name: str
    directory: Path | None
    untouched: bool
    new: tuple[str, ...] = ()
    key_mapping: Mapping[str, str] | None = None


def note_origin(model: nn.Module) -> WeightOrigin | None:
    """Where the weights of ``model`` are from; None where they are of no files, or have been trained since.

    To be called before an engine takes the model; later calls give the same.
    """
    if not hasattr(model, _ATTRIBUTE):
        object.__setattr__(model, _ATTRIBUTE, _of_source(model) or _of_transformers(base_model(model)))
    origin: WeightOrigin | None = getattr(model, _ATTRIBUTE)
    return origin


def forget_origin(model: nn.Module) -> None:
    """From now on the weights are those of a run."""
    object.__setattr__(model, _ATTRIBUTE, None)


def _of_source(model: nn.Module) -> WeightOrigin | None:
    """Of a model whose weights the engine reads itself."""
    source = attached_weights(model)
    for files, before in _files_in(source) if source is not None else ():
        names = [name for name, _ in base_model(model).named_parameters(remove_duplicate=False)]
        new = tuple(name for name in names if any(other.has(name) for other in before))
        return WeightOrigin(str(files.directory), files.directory, True, new, files.key_mapping)
    return None


def _files_in(source: WeightSource) -> Iterator[tuple[FileWeights, list[WeightSource]]]:
    """Files that ``source`` reads, with the sources that are asked before them."""
    if isinstance(source, FileWeights):
        yield source, []
    parts: Sequence[WeightSource] = getattr(source, "sources", ())
    for number, part in enumerate(parts):
        yield from ((files, [*parts[:number], *before]) for files, before in _files_in(part))


def _of_transformers(model: Any) -> WeightOrigin | None:
    """Of a model that ``from_pretrained`` made: it leaves its table of names on the model."""
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    if not name or "_weight_conversions" not in vars(model):
        return None
    untouched = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return WeightOrigin(str(name), _directory_of(str(name), getattr(model.config, "_commit_hash", None)), untouched)


def _directory_of(name: str, revision: str | None) -> Path | None:
    """Where the weight files of a directory or hub name are on this machine, without asking anybody."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory if weight_files(directory) else None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = [try_to_load_from_cache(name, file, revision=revision) for file in FILES]
    except HFValidationError:  # a path that is gone
        return None
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


class WeightCheck:
    """Compares weights with their files, and refuses what they are not.

    Attributes:
        result: of the last comparison; None where there was nothing to compare.
        said: one line for the header; None where there is nothing to say.
    """

    def __init__(self) -> None:
        self.result: Verification | None = None
        self.said: str | None = None

    def loaded(self, model: nn.Module, args: TrainingArguments, engine: Engine | None) -> None:
        """Compare what an engine made of ``model`` with where its weights are from. Collective.

        Args:
            model: whose origin was noted before.
            args: ``verify_weights`` and ``allow_new_weights`` are read.
            engine: that has it; None for a model that is whole and has none.

        Raises:
            ConfigError: they are not what the files hold.
        """
        self.result = self.said = None
        origin = note_origin(model)
        if origin is not None and args.verify_weights != VerifyWeights.NEVER:
            self._compare(model, origin, args, engine)

    def restarted(self, model: nn.Module, directory: Path, args: TrainingArguments, engine: TrainingEngine) -> None:
        """The same after the weights in ``directory`` were put in their place (``start_from_weights``)."""
        self.result = self.said = None
        # Pieces of a checkpoint have checksums, which were compared when they were read.
        if args.verify_weights != VerifyWeights.NEVER and not holds_pieces(directory):
            self._compare(model, WeightOrigin(str(directory), directory, untouched=True), args, engine)

    def _compare(self, model: nn.Module, origin: WeightOrigin, args: TrainingArguments, engine: Engine | None) -> None:
        always = args.verify_weights == VerifyWeights.ALWAYS
        if any(distributed.agree(torch.tensor([int(origin.directory is None)]))):
            self.said = f"not compared with {origin.name}: its files are not on every machine"
            if always:
                raise ConfigError(
                    f"verify_weights='always' ({args.where('verify_weights')}), but the files of {origin.name} are not "
                    "on every machine. Put them there, or set verify_weights='auto'."
                )
            return
        assert origin.directory is not None
        allowed = args.allow_new_weights
        new = allowed if isinstance(allowed, bool) else [*origin.new, *allowed]
        self.result = verify_weights(model, origin.directory, engine, new, origin.key_mapping)
        self.said = str(self.result)
        if self.result.good:
            return
        if always or origin.untouched:
            raise ConfigError(self.result.problems())
        if distributed.rank() == 0:
            logger.warning(
                "The model is not what its files hold. Set verify_weights='always' to stop here, 'never' if that is as "
                "it should be. %s",
                " ".join(self.result.problems()),
            )
