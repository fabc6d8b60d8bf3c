"""The members of the reference API, and what is better here: the rows of docs/reference.md.

A member without a note does what the reference says. One that does not exist yet is found missing by looking.
"""

from __future__ import annotations

_TRAINER: dict[str, str] = {
    "add_callback": "",
    "autocast_smart_context_manager": "",
    "call_model_init": "",
    "compute_loss": "A mean and a sum over `num_items_in_batch` both give the exact gradient of the global batch; "
    "which of the two it is gets verified on the first batch.",
    "compute_loss_context_manager": "",
    "create_accelerator_and_postprocess": "",
    "create_model_card": "A card that a person has written is kept.",
    "create_optimizer": "",
    "create_optimizer_and_scheduler": "",
    "create_scheduler": "",
    "evaluate": "The loss is the exact mean over the items of the whole set, equal for every number of ranks.",
    "evaluation_loop": "No sample is seen twice, none is lost, for every number of ranks.",
    "floating_point_ops": "",
    "get_batch_samples": "One all-reduce a step, hidden behind the first forward pass.",
    "get_cp_size": "",
    "get_decay_parameter_names": "Norms of any class are left out, not only `torch.nn.LayerNorm`.",
    "get_eval_dataloader": "",
    "get_learning_rates": "",
    "get_num_trainable_parameters": "Counts whole tensors under ZeRO stage 3 too.",
    "get_optimizer_cls_and_kwargs": "",
    "get_optimizer_group": "Finds parameters under ZeRO, by name too.",
    "get_sp_size": "",
    "get_test_dataloader": "",
    "get_total_train_batch_size": "The layout's arithmetic; the sampler and the DeepSpeed JSON use the same object.",
    "get_tp_size": "",
    "get_train_dataloader": "A global batch is the same whatever the layout; any position is reached at once.",
    "hyperparameter_search": "",
    "init_hf_repo": "Makes the branch `hub_revision` too; a refusal names its remedy, on all ranks.",
    "is_local_process_zero": "",
    "is_world_process_zero": "",
    "log": "",
    "log_metrics": "",
    "metrics_format": "",
    "num_examples": "",
    "pop_callback": "",
    "predict": "Predictions come in the order of the data, without duplicates, for every number of ranks.",
    "prediction_step": "The loop weighs the batch's mean loss with its items: the mean over the set is exact.",
    "push_to_hub": "Pushes in the background send what was there when they began, whatever is written or removed "
    "meanwhile; a failure is raised on all ranks.",
    "remove_callback": "",
    "save_metrics": "",
    "save_model": "Under ZeRO stage 3 no rank ever holds more than one shard of the model on top of its own part.",
    "save_state": "",
    "set_initial_training_values": "The loop takes its values, so a subclass may change them.",
    "store_flos": "",
    "train": "What cannot run is refused before a process group exists; resuming replays no data.",
    "training_step": "Partial windows and ragged batches are normalised by their own items, over all ranks.",
}
_ARGUMENTS: dict[str, str] = {
    "get_process_log_level": "",
    "get_warmup_steps": "",
    "main_process_first": "",
    "set_dataloader": "",
    "set_evaluate": "",
    "set_logging": "",
    "set_lr_scheduler": "",
    "set_optimizer": "",
    "set_push_to_hub": "",
    "set_save": "",
    "set_testing": "",
    "set_training": "",
    "to_dict": "",
    "to_json_string": "",
    "to_sanitized_dict": "",
}

REFERENCE: dict[str, dict[str, str]] = {
    "Trainer": _TRAINER,
    "Seq2SeqTrainer": {"evaluate": "", "predict": ""},
    "TrainingArguments": _ARGUMENTS,
    "Seq2SeqTrainingArguments": {"to_dict": ""},
    "TFTrainer": {
        "get_train_tfdataset": "",
        "get_eval_tfdataset": "",
        "get_test_tfdataset": "",
        "run_model": "",
    },
    "TFTrainingArguments": {},
}
"""Classes, their members, and what is better here about each."""

REFUSED: dict[str, str] = {
    "TFTrainingArguments": "Of the early reference: take `TrainingArguments`; docs/tensorflow.md says what becomes of "
    "each field.",
}
"""Classes that are not there, and what to use instead."""
