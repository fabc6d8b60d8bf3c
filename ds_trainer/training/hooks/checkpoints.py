"""What is written of a model and of a run, and how a run goes on from it."""

from __future__ import annotations

from pathlib import Path

from ds_trainer.callbacks.state import TrainerState, export_states, restore_states
from ds_trainer.checkpoint.manager import STATE_FILE, CheckpointManager
from ds_trainer.checkpoint.weights import save_pretrained_parts, save_weights
from ds_trainer.optim.swapping import weights_of_evaluation
from ds_trainer.training.best_model import best_checkpoint, note_checkpoint
from ds_trainer.training.hooks.hub import HubHooks
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.sizes import parse_size


class CheckpointHooks(HubHooks):
    """Weights for others, checkpoints for the run itself."""

    @fails_together
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights as safetensors with configuration and tokenizer, for ``from_pretrained``. Collective.

        With ``push_to_hub`` the model is pushed too, except where the save is a part of something else
        (``_internal_call``).
        """
        directory = Path(output_dir) if output_dir is not None else self._output_dir
        self._join_ranks()
        weights_of_evaluation(self.optimizer)
        if self.is_world_process_zero():
            save_pretrained_parts(self.model, self.processing_class, directory)
        save_weights(self.model, directory, parse_size(self.args.max_shard_size))
        if self.args.push_to_hub and not (_internal_call or self._saves_internally):
            self.push_to_hub(commit_message="Model save")

    @fails_together
    def save_checkpoint(self) -> Path:
        """Write everything that resuming needs to ``checkpoint-<global_step>``. Collective."""
        self.state.stateful_callbacks = export_states(self.callback_handler.callbacks)
        note_checkpoint(self.state, self._output_dir)
        checkpoint = self._checkpoints.save(
            self.state.global_step,
            self.state.save_to_json,
            self.lr_scheduler.state_dict(),
            (lambda directory: self.save_internally(str(directory))) if self.args.save_only_model else None,
        )
        self._push_checkpoint(checkpoint)
        return checkpoint

    @property
    def _checkpoints(self) -> CheckpointManager:
        best = self.state.best_model_checkpoint
        keep = self.args.save_total_limit
        return CheckpointManager(self._output_dir, self.engine, keep, Path(best) if best is not None else None)

    def keep_best(self) -> None:
        """When training ends: load the checkpoint of the best evaluation where that is asked for. Collective."""
        best = best_checkpoint(self.args, self.state)
        if best is not None:
            self._checkpoints.load_best(best)
        self._checkpoints.finish()

    def _resume(self, checkpoint: Path, plan: RunPlan) -> None:
        schedule = self._checkpoints.load(checkpoint)
        self.lr_scheduler.load_state_dict(schedule)
        resumed = TrainerState.load_from_json(checkpoint / STATE_FILE)
        fresh = self.state
        self.state = resumed
        self.state.epoch = plan.same_position(resumed.epoch, resumed.max_steps)
        for name in ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size"):
            setattr(self.state, name, getattr(fresh, name))
        restore_states(
            self.callback_handler.callbacks,
            resumed.stateful_callbacks,
            include_arguments=self.args.restore_callback_states_from_checkpoint,
        )
        self.state.is_local_process_zero = fresh.is_local_process_zero
        self.state.is_world_process_zero = fresh.is_world_process_zero
