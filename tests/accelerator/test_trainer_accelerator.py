"""The rest of the accelerator: models, loaders, state, refusals; a subclass that uses much of it; its documentation."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.accelerator.trainer_accelerator import ALTERNATIVES, TrainerAccelerator, members
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.utils.errors import ConfigError
from tests.accelerator.support import accelerator, trainer_for
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.pool import pool

# -- state -------------------------------------------------------------------------------------------------------


def test_the_state_describes_the_engine() -> None:
    ours = accelerator(zero_stage=3, bf16=True, gradient_accumulation_steps=4, max_grad_norm=0.5)
    assert ours.distributed_type == ours.state.distributed_type == "DEEPSPEED"
    assert ours.mixed_precision == ours.state.mixed_precision == "bf16"
    plugin = ours.state.deepspeed_plugin
    assert plugin is ours.deepspeed_plugin and plugin.zero_stage == 3 and plugin.gradient_clipping == 0.5
    assert plugin.gradient_accumulation_steps == ours.gradient_accumulation_steps == 4
    assert plugin.hf_ds_config.is_zero3() and not plugin.hf_ds_config.is_offload()
    config = plugin.deepspeed_config
    config["zero_optimization"]["stage"] = 0
    assert plugin.zero_stage == 3 and plugin.deepspeed_config["bf16"]["enabled"]
    assert ours.state.fsdp_plugin is None and ours.scaler is None and ours.deepspeed_engine_wrapped is None
    assert ours.gradient_state.num_steps == 4 and ours.gradient_state.remainder == -1
    assert not ours.gradient_state.end_of_dataloader


def test_without_mixed_precision() -> None:
    ours = accelerator()
    assert ours.mixed_precision == "no"
    with ours.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_autocast_follows_the_configuration() -> None:
    from accelerate.utils import AutocastKwargs

    ours = accelerator(torch_autocast="bf16")
    assert ours.mixed_precision == "bf16"
    product = nn.Linear(2, 2)
    with ours.autocast():
        assert product(torch.ones(1, 2)).dtype == torch.bfloat16
    with ours.autocast(AutocastKwargs(enabled=False)):
        assert product(torch.ones(1, 2)).dtype == torch.float32


def test_a_bf16_engine_needs_no_autocast() -> None:
    with accelerator(bf16=True).autocast():
        assert not torch.is_autocast_enabled("cpu")


def sizes(stage: int) -> tuple[int, ...]:
    config = accelerator(zero_stage=stage).parallelism_config
    return (config.dp_replicate_size, config.dp_shard_size, config.tp_size, config.total_size,
            config.non_data_parallel_size, config.data_parallel_size)  # fmt: skip


def test_the_parallel_sizes_are_those_of_the_layout() -> None:
    assert pool(2).run(sizes, 0)[0] == (2, 1, 1, 2, 1, 2)
    assert pool(2).run(sizes, 2)[0] == (1, 2, 1, 2, 1, 2)


# -- models and loaders ------------------------------------------------------------------------------------------


def test_the_trained_model_is_prepared_by_the_trainer() -> None:
    trainer = trainer_for()
    optimizer = torch.optim.SGD(trainer.model.parameters())
    model, same = trainer.accelerator.prepare(trainer.model, optimizer)
    assert model is trainer.model and model.training and same is optimizer


def test_another_model_is_for_evaluation_only() -> None:
    ours = accelerator()
    reference = PlainLanguageModel()
    with pytest.raises(ConfigError, match=r"second PlainLanguageModel with \d+ trainable.*evaluation_mode=True"):
        ours.prepare(reference)
    assert ours.prepare_model(reference, evaluation_mode=True) is reference and not reference.training
    frozen = PlainLanguageModel().requires_grad_(False)
    assert ours.prepare(frozen) is frozen and not frozen.training


def second_engine(stage: int, tp: int, sp: int) -> float:
    """What libraries do for a reference model: a second engine from the plugin's configuration."""
    import deepspeed

    trainer = trainer_for(tiny_llama(), zero_stage=stage, bf16=True, tensor_parallel_size=tp, sequence_parallel_size=sp)
    join_ranks(trainer.args)
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    if trainer.accelerator.state.deepspeed_plugin.zero_stage != 3:
        config["zero_optimization"]["stage"] = 0
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config=config)
    engine.eval()
    with torch.no_grad():
        tokens = torch.arange(8)[None]
        loss = float(engine(input_ids=tokens, labels=tokens).loss)
        if tp > 1:  # TRL multiplies hidden states with the weight of the head itself
            hidden = engine.module.model(input_ids=tokens).last_hidden_state
            logits = (hidden @ engine.module.lm_head.weight.T).float()
            loss = float(nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]))
    engine.destroy()
    return loss


@pytest.mark.parametrize(("stage", "tp", "sp"), [(2, 1, 1), (3, 1, 1), (1, 2, 1), (3, 1, 2)])
def test_the_configuration_is_complete_for_a_reference_engine(stage: int, tp: int, sp: int) -> None:
    tokens = torch.arange(8)[None]
    wanted = float(tiny_llama()(input_ids=tokens, labels=tokens).loss)
    found = pool(2).run(second_engine, stage, tp, sp)
    assert found == [pytest.approx(wanted, rel=2e-2)] * 2 and found[0] == found[1]


def test_loaders_of_the_trainer_are_not_wrapped() -> None:
    trainer = trainer_for()
    loader = trainer.get_eval_dataloader(RaggedTokens(4))
    assert trainer.accelerator.prepare(loader) is loader
    with pytest.raises(ConfigError, match="start"):
        trainer.accelerator.skip_first_batches(loader, 1)


def test_batches_can_be_skipped_in_other_loaders() -> None:
    loader: Any = DataLoader(list(range(6)), batch_size=2)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in accelerator().skip_first_batches(loader, 1)] == [[2, 3], [4, 5]]


def test_unwrapping_removes_all_wrappers() -> None:
    ours = accelerator()
    model = PlainLanguageModel()
    assert ours.unwrap_model(model) is model
    assert ours.unwrap_model(nn.DataParallel(model)) is model
    compiled: Any = torch.compile(model)
    assert ours.unwrap_model(compiled) is compiled
    assert ours.unwrap_model(compiled, keep_torch_compile=False) is model


def test_free_memory_releases_objects() -> None:
    import weakref

    model = PlainLanguageModel()
    reference = weakref.ref(model)
    (model,) = accelerator().free_memory(model)
    assert model is None and reference() is None


# -- in training ---------------------------------------------------------------------------------------------------


class Busy(Trainer):
    """Uses the accelerator as trainers of preference and reward libraries do."""

    def __init__(self, *args: Any, reference: nn.Module, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)
        self.store: dict[str, list[float]] = {}
        self.synced: list[bool] = []

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with self.accelerator.autocast(), torch.no_grad():
            before = self.reference(**inputs)["loss"]
        outputs = model(**inputs)
        self.synced.append(self.accelerator.sync_gradients)
        assert self.accelerator.unwrap_model(model) is self.model
        predictions = self.accelerator.pad_across_processes(outputs["logits"].argmax(-1), dim=1, pad_index=-100)
        labels = self.accelerator.gather_for_metrics(inputs["labels"])
        predictions = self.accelerator.gather_for_metrics(predictions)
        with self.accelerator.main_process_first():
            self.store.setdefault("samples", []).append(float(len(labels)))
        gain = self.accelerator.reduce(before - outputs["loss"].detach(), "mean")
        self.store.setdefault("gain", []).append(float(gain))
        self.store.setdefault("accuracy", []).append(float((predictions == labels).float().mean()))
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        means = {name: sum(values) / len(values) for name, values in self.store.items()}
        self.store.clear()
        if self.accelerator.is_main_process:
            means["seen_by_main"] = 1.0
        super().log({**logs, **means}, start_time)


def busy(output_dir: str, stage: int) -> dict[str, Any]:
    args = TrainingArguments(
        output_dir, zero_stage=stage, optim="sgd", learning_rate=0.1, max_steps=2, logging_steps=1, max_grad_norm=1.0,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2
    )  # fmt: skip
    data = RaggedTokens(5)
    trainer = Busy(PlainLanguageModel(), args, train_dataset=data, eval_dataset=data, reference=PlainLanguageModel())
    ours = trainer.accelerator
    assert ours.clip_grad_norm_(trainer.model.parameters(), 1.0) is None
    trainer.train()
    weights = ours.get_state_dict(trainer.model_wrapped)
    ours.save_model(trainer.model_wrapped, f"{output_dir}/exported")
    ours.save({"rank": torch.tensor(ours.process_index)}, f"{output_dir}/saved.pt")
    ours.wait_for_everyone()
    try:
        ours.clip_grad_norm_(trainer.model.parameters(), 2.0)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    report = {
        "logs": trainer.state.log_history,
        "synced": trainer.synced,
        "weights": weights,
        "norm": float(ours.clip_grad_norm_(trainer.model.parameters(), 1.0)),  # type: ignore[arg-type]
        "refused": refused,
        "prepared": ours.prepare(trainer.model) is trainer.model_wrapped,
        "engine": ours.deepspeed_engine_wrapped.engine is trainer.model_wrapped,  # type: ignore[union-attr]
        "skipped": ours.optimizer_step_was_skipped,
    }
    ours.end_training()
    trainer.engine.close()
    return report


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 2), (2, 3)])
def test_a_subclass_that_uses_the_accelerator_everywhere(world: int, stage: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    reports = pool(world).run(busy, str(tmp_path), stage)
    first = reports[0]
    logs = [entry for entry in first["logs"] if "loss" in entry]
    # Five samples: at two ranks 4 + 1 (a dummy on the second), at one rank 2 + 2, then 1.
    assert [entry["samples"] for entry in logs] == ([2.5, 2.5] if world == 2 else [2.0, 1.0])
    assert logs[0]["gain"] == pytest.approx(0.0, abs=1e-6) and abs(logs[1]["gain"]) > 1e-3
    evaluated = next(entry for entry in first["logs"] if "eval_loss" in entry)
    assert evaluated["samples"] == pytest.approx(2.5 if world == 2 else 5 / 3) and evaluated["gain"] != 0
    for rank, report in enumerate(reports):
        accuracies = [entry["accuracy"] for entry in report["logs"] if "accuracy" in entry]
        assert accuracies == [entry["accuracy"] for entry in first["logs"] if "accuracy" in entry]
        assert any("seen_by_main" in entry for entry in report["logs"]) == (rank == 0)
        assert report["prepared"] and report["engine"] and not report["skipped"]
        assert report["norm"] == pytest.approx(logs[-1]["grad_norm"], rel=1e-6)
        assert "max_grad_norm=2.0" in report["refused"] and "max_grad_norm=1.0" in report["refused"]
    assert first["synced"][:2] == ([False, True])
    names = set(PlainLanguageModel().state_dict())
    assert set(first["weights"]) == names and all(len(r["weights"]) in (0, len(names)) for r in reports)
    assert len(reports[-1]["weights"]) == (0 if world == 2 and stage == 3 else len(names))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(exported[name], first["weights"][name]) for name in names)
    assert not torch.equal(exported["head.weight"], PlainLanguageModel().head.weight)
    assert int(torch.load(tmp_path / "saved.pt")["rank"]) == 0


# -- what it is not ------------------------------------------------------------------------------------------------


def test_an_unknown_member_is_an_error_that_lists_members() -> None:
    ours = accelerator()
    with pytest.raises(AttributeError, match=r"ds_trainer's, not accelerate's\. It has .*backward.*gather.*unwrap"):
        ours.gather_everything  # noqa: B018
    assert getattr(ours, "xla_device", None) is None and not hasattr(ours, "megatron")


def test_unsupported_members_name_their_replacement_and_exist_in_accelerate() -> None:
    from accelerate import Accelerator

    ours = accelerator()
    for name, remedy in ALTERNATIVES.items():
        assert hasattr(Accelerator, name) and not hasattr(TrainerAccelerator, name)
        with pytest.raises(AttributeError, match=name) as raised:
            getattr(ours, name)
        assert remedy in str(raised.value)


def test_pickled_weights_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors only"):
        accelerator().save_model(PlainLanguageModel(), str(tmp_path), safe_serialization=False)


def test_its_arguments_have_the_names_and_defaults_of_accelerate() -> None:
    from accelerate import Accelerator

    shared = [name for name in members() if inspect.isfunction(getattr(Accelerator, name, None))]
    assert {"gather", "reduce", "prepare", "unwrap_model", "save_model", "backward"} <= set(shared)
    for name in set(shared) - {"backward"}:  # accelerate hands any keyword on to DeepSpeed
        reference = inspect.signature(getattr(Accelerator, name)).parameters
        found = inspect.signature(getattr(TrainerAccelerator, name)).parameters
        assert [p for p in reference if p != "self"] == [p for p in found if p != "self"] or name in ("prepare",), name
        defaults = {p: v.default for p, v in reference.items() if p in found and name != "save_model"}
        assert defaults == {p: found[p].default for p in defaults}, name


def test_creating_an_accelerator_imports_and_starts_nothing() -> None:
    code = """
import sys, time
from tests.accelerator.support import trainer_for
trainer = trainer_for()
import torch.distributed as dist
assert not dist.is_initialized()
assert "accelerate.state" not in sys.modules, "accelerate was imported"
start = time.perf_counter()
for _ in range(100):
    trainer.create_accelerator_and_postprocess()
print((time.perf_counter() - start) / 100)
"""
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert completed.returncode == 0, completed.stderr
    assert float(completed.stdout) < 0.01


class Substitute(Trainer):
    """Replaces the accelerator with its own."""

    made = 0

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.made += 1


def test_the_accelerator_is_made_once_and_can_be_overridden() -> None:
    trainer = Substitute(PlainLanguageModel(), TrainingArguments("unused", use_cpu=True, report_to="none"))
    assert trainer.made == 1 and trainer.is_deepspeed_enabled and not trainer.is_fsdp_enabled


# -- documentation -------------------------------------------------------------------------------------------------


def test_the_page_lists_every_member_with_its_description() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "accelerator.md").read_text()
    found = [line for line in page.splitlines() if line.startswith("|")]
    table = ["| member | what it does |", "|---|---|"]
    # Sentences of the members that are plain attributes, from the class's docstring.
    lines = inspect.cleandoc(str(TrainerAccelerator.__doc__)).split("Attributes:\n")[1].splitlines()
    pairs = [line.strip().split(": ", 1) for line in lines if line.startswith("    ") and ": " in line]
    descriptions = {name: description for name, description in pairs}
    for name in members():
        member = inspect.getattr_static(TrainerAccelerator, name, None)
        text = inspect.getdoc(member) if callable(member) or isinstance(member, property) else None
        description = descriptions[name] if name in descriptions else str(text).split("\n\n")[0].replace("\n", " ")
        table.append(f"| `{name}` | {description.replace('|', chr(92) + '|')} |")
    assert found[: len(table)] == table, "\n".join(table)
    assert [line.split("`")[1] for line in found[len(table) + 2 :]] == sorted(ALTERNATIVES)


def test_the_example_of_the_page_is_python() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "accelerator.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert any("accelerator" in block for block in blocks)
    for block in blocks:
        ast.parse(block)
