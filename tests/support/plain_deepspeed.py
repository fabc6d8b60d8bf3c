"""Training with a bare DeepSpeed engine, none of our code in it: what checkpoints of others are made with."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import stack

SAMPLES, GLOBAL_BATCH, SEED = 64, 8, 42


def make_data() -> RaggedTokens:
    """What is trained on."""
    return RaggedTokens(SAMPLES, seed=3)


def config_of(stage: int, world: int, tp: int = 1, **more: Any) -> dict[str, Any]:
    """A DeepSpeed configuration without surprises."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // (world // tp),
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if tp > 1:
        config["tensor_parallel"] = {"autotp_size": tp}
    return {**config, **more}


class TensorRanks:
    """DeepSpeed's own arithmetic of batches ignores tensor parallelism without an ``mpu``."""

    def __init__(self, tp: int) -> None:
        self.tp = tp

    def get_data_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size() // self.tp


def grouped(model: Any, decay: float = 0.1) -> list[dict[str, Any]]:
    """Parameters with and without weight decay, as every trainer groups them."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if "norm" not in n and "bias" not in n], "weight_decay": decay},
        {"params": [p for n, p in named if "norm" in n or "bias" in n], "weight_decay": 0.0},
    ]


def make_engine(
    stage: int, tp: int = 1, rate: float = 1e-2, tied: bool = False, sgd: bool = False, frozen: str = "", **more: Any
) -> Any:
    """A DeepSpeed engine over a tiny Llama."""
    import deepspeed

    from ds_trainer.engine.topology import reset_deepspeed_groups

    reset_deepspeed_groups()  # of the engine before in this process
    world = torch.distributed.get_world_size()
    model = tiny_llama(tied=tied)
    for name, parameter in model.named_parameters():
        if frozen and frozen in name:
            parameter.requires_grad_(False)
    groups = grouped(model)
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9) if sgd else torch.optim.AdamW(groups, lr=rate)
    keywords = {"mpu": TensorRanks(tp)} if tp > 1 else {}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config_of(stage, world, tp, **more), **keywords
    )
    return engine


def train(engine: Any, first: int, last: int, tp: int = 1) -> list[float]:
    """Steps ``first`` to ``last`` (exclusive, from 0) over consecutive samples of the epoch's order; global losses."""
    data, losses = make_data(), []
    rank, world = torch.distributed.get_rank() // tp, torch.distributed.get_world_size() // tp
    per_epoch = SAMPLES // GLOBAL_BATCH
    for step in range(first, last):
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        rows = [data[index] for index in order[place * GLOBAL_BATCH : (place + 1) * GLOBAL_BATCH]]
        targets = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
        rows_per_rank = len(rows) // world
        batch = stack(rows[rank * rows_per_rank : (rank + 1) * rows_per_rank])
        logits = engine(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        loss = loss / targets
        engine.backward(loss * world)  # DeepSpeed averages over the ranks
        engine.step()
        global_loss = loss.detach().clone()
        torch.distributed.all_reduce(global_loss)
        losses.append(float(global_loss) / tp)
    return losses


def train_and_save(
    directory: str, stage: int, tp: int = 1, at: int = 3, until: int = 6, more: Any = None
) -> list[float]:
    """Train ``at`` steps, save, continue; returns the losses of the steps after the save."""
    engine = make_engine(stage, tp, **(more or {}))
    train(engine, 0, at, tp)
    engine.save_checkpoint(directory)
    losses = train(engine, at, until, tp)
    engine.destroy()
    return losses


def load_universal_and_train(directory: str, stage: int, tp: int = 1, at: int = 3, until: int = 6) -> list[float]:
    """Resume from a universal checkpoint of DeepSpeed; returns the losses of the steps."""
    engine = make_engine(stage, tp, checkpoint={"load_universal": True})
    path, _ = engine.load_checkpoint(directory)
    assert path is not None
    assert engine.global_steps == at
    if stage == 3:  # DeepSpeed 0.19.8 gives all sub-groups one and the same counter, which then runs too fast
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
    losses = train(engine, at, until, tp)
    engine.destroy()
    return losses
