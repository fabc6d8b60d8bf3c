"""ZeRO-3: weights gathered once for an evaluation, ranks that stop independently, and training continues after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_trainer import TrainerCallback
from ds_trainer.engine import whole_weights as module
from tests.support.collectives import Collectives
from tests.support.pool import pool
from tests.support.translations import VOCABULARY, make, pad_pairs, pairs

# The models are so small that DeepSpeed would keep all their weights on every rank.
SHARDED: dict[str, Any] = {"deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}}


def collectives_of_a_generation(output_dir: str, gather: str) -> tuple[int, int, list[bool], int]:
    """Of 4 and of 12 tokens for the same prompts; whether weights are whole during and after; hooks changed."""
    trainer = make("t5", output_dir, 2, generation_gather=gather, **SHARDED)
    trainer.model.generation_config.eos_token_id = VOCABULARY - 1  # type: ignore[union-attr]
    trainer.evaluate()
    engine = trainer._ds_trainer.engines.current
    assert engine is not None
    hooks = [list(m._forward_hooks) + list(m._forward_pre_hooks) for m in trainer.model.modules()]
    counts, gathered_modules = [], []

    class Probe(TrainerCallback):
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            gathered_modules.append(all(p.shape == p.ds_shape for p in trainer.model.parameters()))

    trainer.predict(pairs(4), max_length=4, min_length=4)  # the ranks compare what they run the first time
    trainer.add_callback(Probe())
    for length in (4, 12):
        with Collectives() as found:
            trainer.predict(pairs(4), max_length=length, min_length=length)
        counts.append(sum(found.values()))
    after = [list(m._forward_hooks) + list(m._forward_pre_hooks) for m in trainer.model.modules()]
    gathered_modules.append(any(p.shape == p.ds_shape for p in trainer.model.parameters() if p.ds_numel > 100))
    return counts[0], counts[1], gathered_modules, sum(a != b for a, b in zip(hooks, after, strict=True))


def test_weights_are_gathered_once(tmp_path: Path) -> None:
    """As many collectives for 12 tokens as for 4; layer by layer every token costs some. Everything is put back."""
    for few, many, gathered, changed in pool(2).run(collectives_of_a_generation, str(tmp_path), "always"):
        assert few == many
        assert gathered == [True, True, False] and changed == 0
    for few, many, gathered, changed in pool(2).run(collectives_of_a_generation, str(tmp_path), "never"):
        assert many >= few + 8 * 2  # for each token more: are all done, and at least one gathering
        assert not any(gathered) and changed == 0


def choices(output_dir: str) -> list[bool]:
    """What ``auto`` decides with much memory, with little on one rank, and with just too little."""
    trainer = make("t5", output_dir, 2, zero_stage=3)
    found = []
    gathered = []

    class Probe(TrainerCallback):
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            phase = trainer._ds_trainer.engines.generation
            gathered.append(phase is not None and phase.gathered)

    trainer.add_callback(Probe())
    real = module.free_memory
    needed = sum(p.numel() * 4 for p in trainer.model.parameters()) * 2  # of both ranks, which share the machine
    for free in ({}, {1: 1000}, {0: 2 * needed - 1, 1: 2 * needed - 1}, {0: 2 * needed, 1: 2 * needed}):
        module.free_memory = lambda device, free=free: free.get(dist.get_rank(), real(device))  # type: ignore[assignment]
        try:
            trainer.predict(pairs(2), max_length=3)
        finally:
            module.free_memory = real
        found.append(gathered[-1])
    return found


def test_auto_gathers_where_half_of_the_free_memory_is_enough(tmp_path: Path) -> None:
    assert pool(2).run(choices, str(tmp_path)) == [[True, False, False, True]] * 2


def trained(output_dir: str, gather: str, evaluate: bool) -> dict[str, Any]:
    """Two steps, an evaluation that generates after each; on rank 1 sequences end much later than on rank 0."""
    given = {"eval_strategy": "steps", "eval_steps": 1} if evaluate else {}
    trainer = make(
        "t5", output_dir, 3, zero_stage=3, generation_gather=gather, max_steps=3, learning_rate=1e-2, **given
    )
    trainer.train()
    batch = pad_pairs(pairs(3))
    with torch.no_grad():
        logits = trainer.model_wrapped(**batch)["logits"]
    return {"metrics": [e["eval_order"] for e in trainer.state.log_history if "eval_order" in e], "logits": logits}


@pytest.mark.extended
def test_gathering_for_generation_does_not_change_training(tmp_path: Path) -> None:
    (plain, _), (gathered, _), (in_step, _) = (
        pool(2).run(trained, str(tmp_path), gather, evaluate)
        for gather, evaluate in (("never", False), ("always", True), ("never", True))
    )
    assert len(gathered["metrics"]) == 3 and gathered["metrics"] == in_step["metrics"]
    torch.testing.assert_close(gathered["logits"], plain["logits"], rtol=0, atol=0)
    torch.testing.assert_close(in_step["logits"], plain["logits"], rtol=0, atol=0)


def ends_alone(output_dir: str) -> int:
    """Forward passes of the decoder on this rank, where rank 0 has sequences that end at once."""
    trainer = make("t5", output_dir, 2, generation_gather="always", per_device_eval_batch_size=1, **SHARDED)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    length = 3 if dist.get_rank() == 0 else 15
    trainer.predict(pairs(2), max_length=3, min_length=3)  # the first one also measures what the loss is the mean of
    trainer.model.register_forward_pre_hook(count)
    trainer.predict(pairs(2), max_length=length, min_length=length)
    return passes


def test_ranks_stop_generating_independently(tmp_path: Path) -> None:
    short, long = pool(2).run(ends_alone, str(tmp_path))
    assert short < 5 and long > 12


def sampled(output_dir: str, sizes: dict[str, int], stage: int) -> list[list[int]]:
    trainer = make("decoder", output_dir, 4, zero_stage=stage, **sizes)
    torch.manual_seed(100 + dist.get_rank())  # their generators differ
    first = trainer.predict(trainer.eval_dataset, max_new_tokens=8, do_sample=True)
    repeated = trainer.predict(trainer.eval_dataset, max_new_tokens=8, do_sample=True)
    assert (first.predictions == repeated.predictions).all()  # they follow from seed and step
    before = torch.get_rng_state()
    tokens = trainer._ds_trainer.generate(pad_pairs(trainer.eval_dataset), {"max_new_tokens": 8, "do_sample": True})
    assert torch.equal(before, torch.get_rng_state())  # and cost training nothing
    return list(tokens.tolist())


@pytest.mark.parametrize(("axis", "stage"), [("tensor_parallel_size", 0), ("sequence_parallel_size", 3)])
def test_the_ranks_of_a_replica_sample_the_same_tokens(axis: str, stage: int, tmp_path: Path) -> None:
    one, other = pool(2).run(sampled, str(tmp_path), {axis: 2}, stage)
    assert one == other
