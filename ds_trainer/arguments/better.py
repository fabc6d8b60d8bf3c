"""Which arguments do more here than in the reference, and what: notes for docs/reference.md."""

from __future__ import annotations

BETTER: dict[str, str] = {
    "per_device_train_batch_size": "The last round of an epoch is dealt out evenly: no sample twice, none left out.",
    "gradient_accumulation_steps": "A partial last window is normalised by its own items, over all ranks.",
    "optim": "Becomes the DeepSpeed or torch class that fits device and offload.",
    "max_grad_norm": "0 really means no clipping (DeepSpeed clips at 1.0 when it is not told).",
    "average_tokens_across_devices": "Always on: the gradient never depends on the number of ranks.",
    "bf16": "Compiled into the engine's precision, with the gradient accumulation type written out.",
    "activation_checkpointing": "Also by DeepSpeed's own implementation, when the deepspeed file asks for it.",
    "zero_stage": "An addition: the stage without a file.",
    "offload_optimizer": "An addition: `cpu` or `nvme` without a file.",
    "offload_param": "An addition: `cpu` or `nvme` without a file.",
    "nvme_path": "An addition.",
    "deepspeed": "Every value in the compiled JSON has an origin; contradictions are refused with both places.",
    "ddp_timeout": "The timeout of every collective.",
    "logging_nan_inf_filter": "Filtered steps are counted, logged and warned of once.",
    "logging_steps": "The logged loss is the mean of the window over all ranks; the device is waited for only then.",
    "bf16_full_eval": "After the evaluation the weights are what they were; the reference leaves them cast.",
    "fp16_full_eval": "After the evaluation the weights are what they were; the reference leaves them cast.",
    "eval_use_gather_object": "The result has one form for every number of ranks: lists are sequences of samples.",
    "load_best_model_at_end": "Weights and optimizer state, under every ZeRO stage.",
    "metric_for_best_model": "The main process's value decides, so that ranks agree.",
    "save_only_model": "Written as safetensors.",
    "ignore_data_skip": "Skipping costs nothing: any position is reached at once.",
    "dataloader_drop_last": "Only a round that some rank could not fill is left out.",
    "seed": "The order of samples follows from seed and epoch alone, whatever the layout.",
    "data_seed": "The order of samples follows from seed and epoch alone, whatever the layout.",
    "train_sampling_strategy": "The same samples form a global batch whatever the layout.",
}
