"""trainer.accelerator and accelerator_config."""

from __future__ import annotations

from typing import Any

import torch

from tests.behaviors.api import Api


def members(api: Api) -> Any:
    accelerator = api.plain_trainer().accelerator
    names = ("is_main_process", "is_local_main_process", "num_processes", "process_index", "local_process_index")
    return {**{name: getattr(accelerator, name) for name in names}, "device": str(accelerator.device)}


def precision(api: Api) -> Any:
    accelerator = api.plain_trainer().accelerator
    return [accelerator.mixed_precision, accelerator.sync_gradients, accelerator.use_distributed]


def collectives(api: Api) -> Any:
    accelerator = api.plain_trainer().accelerator
    tensor = torch.arange(3.0)
    return [
        accelerator.gather(tensor),
        accelerator.gather_for_metrics({"a": tensor})["a"],
        accelerator.reduce(tensor, "mean"),
        accelerator.pad_across_processes(torch.ones(1, 2), dim=1, pad_index=-100),
    ]


def gathered_scalar(api: Api) -> Any:
    return list(api.plain_trainer().accelerator.gather(torch.tensor(1.0)).shape)


def unwraps(api: Api) -> Any:
    trainer = api.plain_trainer()
    return trainer.accelerator.unwrap_model(trainer.model) is trainer.model


def after_training_unwraps(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model)
    return sorted(state)


def prints_and_waits(api: Api) -> Any:
    import contextlib
    import io

    accelerator, text = api.plain_trainer().accelerator, io.StringIO()
    with contextlib.redirect_stdout(text), accelerator.main_process_first():
        accelerator.print("hello")
        accelerator.wait_for_everyone()
    return text.getvalue()


def state_has_a_plugin(api: Api) -> Any:
    return getattr(api.plain_trainer().accelerator.state, "deepspeed_plugin", None) is not None


def config_in_all_forms(api: Api) -> Any:
    path = api.directory / "config.json"
    path.write_text('{"split_batches": true, "even_batches": false}')
    forms: list[Any] = [None, {"split_batches": True}, str(path)]
    found = []
    for form in forms:
        accelerator = api.plain_trainer({"accelerator_config": form}).accelerator
        found.append([accelerator.split_batches, accelerator.even_batches, accelerator.dispatch_batches])
    return found


def config_object(api: Api) -> Any:
    from transformers.trainer_pt_utils import AcceleratorConfig

    config = AcceleratorConfig(split_batches=True, use_seedable_sampler=False)
    trainer = api.plain_trainer({"accelerator_config": config})
    return [trainer.accelerator.split_batches, trainer.accelerator.use_seedable_sampler]


def config_steps(api: Api) -> Any:
    config = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    trainer = api.plain_trainer({"accelerator_config": config, "max_steps": 2})
    return [trainer.args.gradient_accumulation_steps, trainer.train().global_step]
