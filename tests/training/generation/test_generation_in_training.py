"""``generate`` called by a training step, a loss or a callback: the text of one process, and training as without it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from tests.support.collectives import Collectives
from tests.support.pool import RankFailure, pool
from tests.support.runs import whole_weights
from tests.support.translations import pad_left, prompts, tiny_decoder

STEPS, GLOBAL_BATCH = 3, 4
# DeepSpeed would keep all weights of a model as small as this on every rank.
_KEPT = ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
SHARDED: dict[str, Any] = {"deepspeed": {"zero_optimization": {"stage": 3, **{f"stage3_{name}": 0 for name in _KEPT}}}}


def question() -> dict[str, torch.Tensor]:
    """Prompts that every rank has."""
    batch = pad_left(prompts(3))
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


class Generating(Trainer):
    """Generates in every step, wherever users do, and keeps the tokens; not if ``generates`` is false."""

    generates = False
    tokens: dict[str, list[Any]]

    def generated(self, place: str, model: Any, **keywords: Any) -> None:
        found = model.generate(**question(), **{"max_new_tokens": 6, **keywords})
        self.tokens.setdefault(place, []).append(found.tolist())

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.generates:
            self.generated("step", self.model)
            self.generated("engine", self.model_wrapped)
            self.generated("unwrapped", self.accelerator.unwrap_model(model))
            with self.unwrap_model_for_generation() as unwrapped:
                assert not any(module.training for module in unwrapped.modules())
                for _ in range(self.times()):
                    self.generated("context", unwrapped)
            assert all(module.training for module in self.model.modules())
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **keywords)
        if self.generates:  # between the forward and the backward pass
            self.generated("loss", self.model)
        return loss

    def times(self) -> int:
        """How often a replica generates in a context: unequally often, unless the weights are gathered for a layer."""
        unequal = self.args.generation_gather != "never"
        return 1 + unequal * (distributed.rank() // self.layout.replica_size)


class AtStepEnd(TrainerCallback):
    """Generates with the model that callbacks get."""

    trainer: Generating

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.trainer.generated("callback", model)


def make(output_dir: str, cls: type[Generating] = Generating, **changes: Any) -> Generating:
    """A trainer with a global batch of 4 prompts."""
    values: dict[str, Any] = dict(
        max_steps=STEPS, learning_rate=1e-2, logging_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True
    )
    args = TrainingArguments(output_dir, **{**values, **changes})
    args.per_device_train_batch_size = GLOBAL_BATCH * replica_size(changes) // distributed.world_size()
    trainer = cls(tiny_decoder(), args, data_collator=pad_left, train_dataset=prompts(16))
    trainer.tokens = {}
    return trainer


def replica_size(changes: dict[str, Any]) -> int:
    """Ranks of a replica; no layout here has two axes."""
    return max(int(changes.get(f"{axis}_parallel_size", 1)) for axis in ("tensor", "context", "sequence"))


def trained(output_dir: str, generates: bool, changes: dict[str, Any]) -> dict[str, Any]:
    """Tokens, losses, gradient norms and weights of a short run."""
    trainer = make(output_dir, **changes)
    if generates:
        callback = AtStepEnd()
        callback.trainer = trainer
        trainer.generates = True
        trainer.add_callback(callback)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = {
        "tokens": trainer.tokens,
        "losses": [(log["loss"], log["grad_norm"]) for log in logs],
        "weights": whole_weights(trainer),
        "times": trainer.times(),
    }
    trainer._ds_trainer.engines.close()
    assert "generate" not in vars(trainer.model)
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank, ZeRO-3": (1, {**SHARDED, "generation_gather": "always"}),
    "2 ranks, ZeRO-2": (2, {"zero_stage": 2}),
    "2 ranks, ZeRO-3, once": (2, {**SHARDED, "generation_gather": "always"}),
    "2 ranks, ZeRO-3, layer by layer": (2, {**SHARDED, "generation_gather": "never"}),
    "4 ranks, ZeRO-3": (4, SHARDED),
    "tp 2": (2, {"zero_stage": 0, "tensor_parallel_size": 2}),
    "dp 2 x tp 2, ZeRO-3": (4, {**SHARDED, "tensor_parallel_size": 2}),
    "sp 2": (2, {"zero_stage": 0, "sequence_parallel_size": 2}),
    "dp 2 x cp 2, ZeRO-3": (4, {**SHARDED, "context_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The tokens of one process."""
    tokens: dict[str, list[Any]] = trained(str(tmp_path_factory.mktemp("one")), True, {"zero_stage": 0})["tokens"]
    return tokens


def test_places_in_one_process_agree(one_process: dict[str, list[Any]]) -> None:
    """The first step computes its loss more than once, to find out what kind of loss it is."""
    step = one_process["step"]
    assert step == one_process["engine"] == one_process["unwrapped"] == one_process["context"]
    assert step == one_process["loss"][-STEPS:] and step[1:] == one_process["callback"][:-1]
    assert len({str(found) for found in one_process["callback"]}) > 1  # training changes them


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_generation_in_training(name: str, one_process: dict[str, list[Any]], tmp_path: Path) -> None:
    """Tokens are those of one process; losses, gradient norms and weights those of this layout without generation."""
    world, changes = LAYOUTS[name]
    plain = pool(world).run(trained, str(tmp_path), False, changes)
    for rank, found in enumerate(pool(world).run(trained, str(tmp_path), True, changes)):
        for place, wanted in one_process.items():
            times = found["times"] if place == "context" else 1
            assert found["tokens"][place][-STEPS * times :: times] == wanted[-STEPS:], place
        assert found["losses"] == plain[rank]["losses"]
        for weight, tensor in plain[rank]["weights"].items():
            assert torch.equal(found["weights"][weight], tensor), weight


# -- what it costs -----------------------------------------------------------------------------------------------------


def collectives(output_dir: str, gather: str) -> dict[str, Any]:
    """Of 4 and of 12 tokens in one call; of one call and of three in a context; of a step before and after."""
    trainer = make(output_dir, generation_gather=gather, max_steps=4, **SHARDED)
    trainer.model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    found: dict[str, Any] = {"parameters": len(list(trainer.model.parameters()))}

    def counted(name: str, *calls: int) -> None:
        with Collectives() as counts:
            for length in calls:
                trainer.generated("", trainer.model, max_new_tokens=length)
        found[name] = sum(counts.values())

    class Counting(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if trainer.state.global_step != 2:
                return
            counted("first", 4)  # the ranks compare what they run for the first time
            counted("4 tokens", 4)
            counted("12 tokens", 12)
            with trainer.unwrap_model_for_generation():
                counted("in a context", 4, 4, 4)

    trainer.add_callback(Counting())
    trainer.train()
    trainer._ds_trainer.engines.close()
    return found


@pytest.mark.extended
def test_weights_are_gathered_once_for_each_call_or_context(tmp_path: Path) -> None:
    for found in pool(2).run(collectives, str(tmp_path), "always"):
        assert found["4 tokens"] == found["12 tokens"] == found["parameters"]
        assert found["in a context"] == 0
    for found in pool(2).run(collectives, str(tmp_path), "never"):
        assert found["12 tokens"] >= found["4 tokens"] + 8 * 2  # for each token: are all done, and a gathering
        assert found["in a context"] >= 3 * found["4 tokens"] - 8


def unequal(output_dir: str, gather: str) -> tuple[int, float]:
    """Forward passes of a rank that generates 3 or 15 tokens, and the loss of the step that follows."""
    trainer = make(output_dir, generation_gather=gather, max_steps=2, **SHARDED)
    trainer.model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    passes = [0]

    def count(*_: Any) -> None:
        passes[0] += 1

    class AtStart(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            hook = trainer.model.register_forward_pre_hook(count)
            trainer.generated("", trainer.model, max_new_tokens=3 if dist.get_rank() == 0 else 15)
            hook.remove()

    trainer.add_callback(AtStart())
    trainer.train()
    assert [len(rows[0]) - 9 for rows in trainer.tokens[""]] == [3 if dist.get_rank() == 0 else 15] * 2
    trainer._ds_trainer.engines.close()
    return passes[0], trainer.state.log_history[-2]["loss"]


@pytest.mark.extended
def test_ranks_may_generate_unequal_lengths(tmp_path: Path) -> None:
    """Gathered, each stops by itself; layer by layer, all go on until the last one is done."""
    (short, loss), (long, _) = pool(2).run(unequal, str(tmp_path), "always")
    assert (short, long) == (2 * 3, 2 * 15)
    (first, same), (second, _) = pool(2).run(unequal, str(tmp_path), "never")
    assert first == second >= 2 * 15 and same == loss


@pytest.mark.cases(1)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_generation_uses_the_cache(checkpointing: bool, tmp_path: Path) -> None:
    """Of 9 tokens of a prompt and 8 new ones, each but the last goes through the model once, in training mode too."""
    trainer = make(str(tmp_path), gradient_checkpointing=checkpointing, max_steps=1)
    trainer.model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    seen: list[int] = []

    def embedded(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0].shape[1])

    class AtStart(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            hook = trainer.model.get_input_embeddings().register_forward_pre_hook(embedded)  # type: ignore[operator]
            assert trainer.model.training
            trainer.generated("", trainer.model, max_new_tokens=8)
            hook.remove()

    trainer.add_callback(AtStart())
    trainer.train()
    assert seen == [9] + [1] * 7
    assert any(getattr(layer, "gradient_checkpointing", False) for layer in trainer.model.modules()) == checkpointing
    trainer._ds_trainer.engines.close()


# -- sampling, copies, scripts that remove hooks -----------------------------------------------------------------------


def sampled(output_dir: str, changes: dict[str, Any], own_prompts: bool = False) -> list[Any]:
    """Two samples, drawn in a callback whose generators differ between the ranks of a replica."""
    trainer = make(output_dir, max_steps=1, **changes)

    class AtStart(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.manual_seed(100 + distributed.rank())
            for _ in range(2):
                trainer.generated("", trainer.model, do_sample=True)
            if own_prompts:
                trainer.model.generate(torch.tensor([[4 + distributed.rank()]]))  # type: ignore[operator]

    trainer.add_callback(AtStart())
    trainer.train()
    trainer._ds_trainer.engines.close()
    return trainer.tokens[""]


REPLICAS = [{"tensor_parallel_size": 2, "zero_stage": 0}, {"sequence_parallel_size": 2, **SHARDED}]


@pytest.mark.cases(1)
@pytest.mark.parametrize("changes", REPLICAS)
def test_the_ranks_of_a_replica_draw_what_one_process_draws(changes: dict[str, Any], tmp_path: Path) -> None:
    first, second = sampled(str(tmp_path), {"zero_stage": 0})
    assert first != second
    for tokens in pool(2).run(sampled, str(tmp_path), changes):
        assert tokens == [first, second]


def test_different_prompts_within_a_replica_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="with different prompts on the ranks of a replica") as error:
        pool(2).run(sampled, str(tmp_path), REPLICAS[0], True)
    assert ConfigError.__name__ in str(error.value)


def copied(output_dir: str) -> bool:
    """Whether a copy of the model, which has no engine, generates by itself; also while the weights are sharded."""
    trainer = make(output_dir, max_steps=1, zero_stage=1)
    found = []

    class AtStart(TrainerCallback):
        def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
            other = copy.deepcopy(model)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            text = other.generate(**question(), max_new_tokens=4, eos_token_id=None)
            found.append(bool((text[:, 9:] == 0).all()))

    trainer.add_callback(AtStart())
    trainer.train()
    trainer._ds_trainer.engines.close()
    return found[0]


def test_a_copy_of_the_model_generates_with_its_own_weights(tmp_path: Path) -> None:
    assert pool(2).run(copied, str(tmp_path)) == [True, True]


class RemovingHooks(Generating):
    """Generates as TRL does: gathers, removes the hooks of DeepSpeed, and registers them again."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        import deepspeed

        if not self.args.do_predict:
            return super().training_step(model, inputs, num_items_in_batch)
        offload = model.optimizer.parameter_offload
        hooks = [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in self.model.modules()]
        with Collectives() as counts, deepspeed.zero.GatheredParameters(model.parameters()):
            for hook in [*offload.forward_hooks, *offload.backward_hooks]:
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            for _ in range(1 + dist.get_rank()):
                self.generated("", self.accelerator.unwrap_model(model))
            if not offload.param_coordinator.is_invalid_trace():
                offload.param_coordinator._invalidate_trace()
            offload._register_deepspeed_module(offload.module)
        assert counts["all_reduce"] == 0
        assert hooks == [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in self.model.modules()]
        return super().training_step(model, inputs, num_items_in_batch)


def removed(output_dir: str, generates: bool) -> dict[str, Any]:
    """A run, and what its engine does in an evaluation afterwards."""
    trainer = make(output_dir, RemovingHooks, do_predict=generates, generation_gather="never", **SHARDED)
    trainer.train()
    trainer.evaluate(prompts(4))  # the ranks compare what they run for the first time
    with Collectives() as counts:
        trainer.evaluate(prompts(4))
    found = {
        "tokens": trainer.tokens.get("", []),
        "weights": whole_weights(trainer),
        "collectives": dict(counts),
        "modules": [module.ds_id for module in trainer.model.modules()],
    }
    trainer._ds_trainer.engines.close()
    return found


def test_scripts_may_remove_the_hooks_and_register_them_again(
    one_process: dict[str, list[Any]], tmp_path: Path
) -> None:
    plain = pool(2).run(removed, str(tmp_path), False)
    for rank, found in enumerate(pool(2).run(removed, str(tmp_path), True)):
        assert found["tokens"] == [tokens for tokens in one_process["step"] for _ in range(1 + rank)]
        assert all(torch.equal(found["weights"][name], plain[rank]["weights"][name]) for name in found["weights"])
        assert found["collectives"] == plain[rank]["collectives"]
        assert found["modules"][1:] == [found["modules"][0] + n for n in range(1, len(found["modules"]))]


def test_before_training_the_model_itself_is_given(tmp_path: Path) -> None:
    trainer = make(str(tmp_path))
    trainer.model.train()
    with trainer.unwrap_model_for_generation() as model:
        assert model is trainer.model and not model.training
        trainer.generated("", model)
    assert trainer.model.training and len(trainer.tokens[""]) == 1
    with pytest.raises(ValueError, match="sometimes"), trainer.unwrap_model_for_generation("sometimes"):
        pass
