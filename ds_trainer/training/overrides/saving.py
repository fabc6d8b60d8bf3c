"""Methods of the Trainer that save the model to a directory, and push it to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.weights.model_saving import (
    save_config_and_processor,
    save_given_weights,
    save_weights,
)
from ds_trainer.engine.weights import full_shape, gathered, saved_tensors
from ds_trainer.engine.whole_weights import unhooked
from ds_trainer.optim.script_optimizers import use_evaluation_weights
from ds_trainer.training.loading.model_argument import is_on_meta
from ds_trainer.training.model.cache import original_cache_settings
from ds_trainer.training.overrides.base import TrainerBase
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.files import write_text_atomic
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.printable import shown
from ds_trainer.utils.units import parse_size

logger = get_logger(__name__)

CARD = "README.md"


class Saving(TrainerBase):
    """Saves the model to a directory, and pushes it to a repository on the Hub."""

    @fails_together
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights as safetensors with configuration and tokenizer, for ``from_pretrained``. Collective.

        With ``push_to_hub`` the model is pushed too, unless the save is part of a push or checkpoint
        (``_internal_call``).
        """
        directory = Path(output_dir) if output_dir is not None else self._ds_trainer.output_dir
        assembly = self._ds_trainer
        join_ranks(self.args)
        if is_on_meta(self.model):  # its weights have not been loaded yet
            assembly.evaluator.model(None)
        if (engine := assembly.engines.training_or_none) is not None:
            engine.follow_written_weights()
        use_evaluation_weights(self.optimizer)
        if "_save" in assembly.overridden:
            # Call an override of `_save` on the main process while the weights are complete on each rank.
            with gathered(list(self.model.parameters())):
                if self.is_world_process_zero():
                    state = {name: value.detach().cpu() for name, value in saved_tensors(self.model).items()}
                    with original_cache_settings(self.model), unhooked(self.model):
                        self._save(str(directory), state_dict=state)
                distributed.barrier()
        else:
            if self.is_world_process_zero():
                with original_cache_settings(self.model):
                    save_config_and_processor(self.model, assembly.saved_processing_class, directory)
            save_weights(self.model, directory, parse_size(self.args.max_shard_size))
        if self.args.push_to_hub and not (_internal_call or assembly.publisher.is_saving):
            self.push_to_hub(commit_message="Model save")

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the model to a directory, in this process alone. Override it to write other files.

        :meth:`save_model` calls an override on the main process, while the weights of ``self.model`` are complete
        there; it has no effect on :meth:`save_model` otherwise. Scripts call it with weights that they have gathered.

        Args:
            output_dir: created if missing; default: the output directory of the run.
            state_dict: full tensors by name; default: those of ``self.model``.

        Raises:
            ConfigError: there is no ``state_dict``, and the model is sharded.
        """
        directory = Path(output_dir) if output_dir is not None else self._ds_trainer.output_dir
        if state_dict is None and any(
            tuple(parameter.shape) != full_shape(parameter) for parameter in self.model.parameters()
        ):
            raise ConfigError(
                "_save() without a state_dict cannot write a sharded model in one process. Call save_model() on all "
                "ranks, or pass state_dict=trainer.accelerator.get_state_dict(trainer.model)."
            )
        with original_cache_settings(self.model):
            save_config_and_processor(self.model, self._ds_trainer.saved_processing_class, directory)
        save_given_weights(self.model, state_dict, directory, parse_size(self.args.max_shard_size))

    @fails_together
    def save_checkpoint(self) -> Path | None:
        """Write a checkpoint to ``checkpoint-<global_step>`` while training waits. Collective.

        Returns:
            Its path; None if it could not be written and ``save_failure_policy="continue"``.

        Raises:
            ConfigError: there has been no training.
            SaveFailed: it could not be written; on all ranks.
        """
        checkpointer = self._ds_trainer.checkpointer
        if checkpointer is None:
            raise ConfigError("There is nothing to save yet: call train() before save_checkpoint().")
        return checkpointer.save()

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Called when a checkpoint is due. Override it to save more; call this method from the override. Collective.

        An override finds the complete checkpoint on the disk after this call. Without one it is written in the
        background.

        Args:
            model, trial: ignored; part of the signature in transformers.

        Raises:
            ConfigError: there has been no training.
            SaveFailed: it could not be written; on all ranks.
        """
        checkpointer = self._ds_trainer.checkpointer
        if checkpointer is None:
            raise ConfigError("There is nothing to save yet: call train() before _save_checkpoint().")
        if "_save_checkpoint" in self._ds_trainer.overridden:
            checkpointer.save()
        else:
            checkpointer.save_in_background()

    # -- the Hub ------------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Open the repository ``args.hub_model_id`` and the branch ``args.hub_revision``; creates them if missing.

        The constructor calls it if ``push_to_hub=True``. Only the main process does anything.

        Args:
            token: a token with write permission; default: ``args.hub_token``, then that of the environment.
            private: whether a new repository is private; default: ``args.hub_private_repo``.

        Raises:
            ConfigError: the Hub rejects the token, the name or the branch; or huggingface_hub is not installed.
            HubError: the Hub does not answer.
        """
        if not self.is_world_process_zero():
            return
        self._ds_trainer.publisher.open_here(token, private)

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write ``README.md`` to the output directory (main process): metadata, hyperparameters, results, versions.

        Missing arguments are those of an earlier call, or are derived from the model, the data and the run. A card
        that a user has written is kept.

        Args:
            language: language of the model, as abbreviated on the Hub: ``en``.
            license: license, as abbreviated on the Hub; default: that of the base model, if the Hub has it.
            tags: further tags for the search on the Hub.
            model_name: heading.
            finetuned_from: repository of the base model.
            tasks: task names of the Hub, such as ``text-classification``.
            dataset_tags: names of the datasets on the Hub; without them and ``tasks`` there is no ``model-index``.
            dataset: display names of the datasets.
            dataset_args: configurations of the datasets.

        Raises:
            ConfigError: huggingface_hub is not installed.
        """
        from ds_trainer.training.hub.card import card_text, is_generated
        from ds_trainer.training.hub.card_facts import CardSource, facts_of

        if not self.is_world_process_zero():
            return
        given: dict[str, Any] = dict(
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )
        given = {name: value for name, value in given.items() if value is not None}
        assembly = self._ds_trainer
        publisher = assembly.publisher
        publisher.card_arguments = {**publisher.card_arguments, **given}
        path = self._ds_trainer.output_dir / CARD
        if path.exists() and not is_generated(path.read_text(encoding="utf-8")):
            logger.info("%s was written or edited by a user and is kept.", path)
            return
        dataset = self.eval_dataset if self.eval_dataset is not None else self.train_dataset
        source = CardSource(
            model=self.model,
            args=self.args,
            state=self.state,
            batch_plan=assembly.batch_plan,
            config=assembly.compiled,
            optimizer=self.optimizer,
            dataset=dataset,
        )
        try:
            text = card_text(facts_of(source, publisher.card_arguments))
        except ImportError:
            raise ConfigError("A model card needs the package huggingface_hub: pip install huggingface_hub.") from None
        write_text_atomic(path, shown(text))

    @fails_together
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model to the output directory and push that directory without checkpoints. Collective.

        Args:
            commit_message: the commit message.
            blocking: whether to wait for the push; otherwise it runs in the background, after earlier pushes.
            token: the token from now on; default: see :meth:`init_hf_repo`.
            revision: branch, created if missing; default: ``args.hub_revision``, or the main branch.
            private: whether a new repository is private.
            **kwargs: arguments of :meth:`create_model_card`.

        Returns:
            The ``CommitInfo`` of huggingface_hub on the main process, or without ``blocking`` a ``Future`` of it; None
            on the other ranks.

        Raises:
            ConfigError: the Hub rejects the push; on all ranks.
            HubError: the Hub does not answer; on all ranks. In a background push, the future raises both.
        """
        join_ranks(self.args)
        return self._ds_trainer.publisher.push(commit_message, blocking, token, revision, private, kwargs)
