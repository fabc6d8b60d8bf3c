"""Private methods of transformers' Trainer that subclasses override: called at the right time, results used."""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from ds_trainer import ConfigError, Trainer, TrainingArguments
from tests.support.models import RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.pool import pool
from tests.support.runs import whole_weights

SHARED: dict[str, Any] = dict(
    per_device_train_batch_size=2,
    max_steps=3,
    lr_scheduler_type="constant",
    optim="sgd",
    learning_rate=0.1,
    max_grad_norm=0.0,
    logging_steps=1,
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
)


def made(trainer_class: type[Trainer], folder: Path | str, model: Any = None, data: Any = None, **changes: Any) -> Any:
    args = TrainingArguments(str(folder), **{**SHARED, **changes})
    data = regression_rows(12) if data is None else data
    return trainer_class(model or Regression(), args, train_dataset=data, eval_dataset=data)


# -- refused and not called --------------------------------------------------------------------------------------------


def test_a_subclass_that_replaces_the_loop_is_refused_when_it_is_defined() -> None:
    with pytest.raises(ConfigError) as caught:

        class Own(Trainer):
            def _inner_training_loop(self) -> None: ...

            def _maybe_log_save_evaluate(self) -> None: ...

    assert len(caught.value.problems) == 2
    assert "Own._inner_training_loop is private to transformers' Trainer" in caught.value.problems[0]
    assert "TrainerCallback.on_step_end" in caught.value.problems[1]


def test_a_mixin_that_replaces_the_loop_is_refused() -> None:
    class Mixin:
        def _clip_grad_norm(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Mixin\._clip_grad_norm is private .*max_grad_norm"):
        type("Own", (Mixin, Trainer), {})


class NoBackward(Trainer):
    """Forgets the backward pass in step 2."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.state.global_step == 1:
            return torch.zeros(())
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_without_a_backward_pass_is_said(stage: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no backward pass in this step, so ZeRO {stage} .* loss \* 0\.0"):
        made(NoBackward, tmp_path, zero_stage=stage).train()


def test_reading_a_name_without_counterpart_names_the_alternative(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path)
    with pytest.raises(AttributeError, match=r"use trainer\.state\.log_history"):
        trainer._globalstep_last_logged  # noqa: B018
    with pytest.raises(AttributeError, match=r"does not exist: train.*restores all weights by name"):
        trainer._load_from_checkpoint("x")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        trainer.nonsense  # noqa: B018
    assert not hasattr(trainer, "_total_loss_scalar")


def test_an_override_that_is_not_called_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(Trainer):
        def _load_best_model(self) -> None:
            raise AssertionError

    logging.getLogger("ds_trainer").propagate = True
    with caplog.at_level(logging.INFO, logger="ds_trainer"):
        made(Own, tmp_path).train()
    assert "Own._load_best_model is not called: set load_best_model_at_end=True" in caplog.text


# -- order -------------------------------------------------------------------------------------------------------------


class Backwards:
    """Positions from the last to the first, each twice; every epoch begins one later."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.iterated = 0

    def __len__(self) -> int:
        return 2 * self.samples

    def __iter__(self) -> Any:
        order = [(position + self.iterated) % self.samples for position in reversed(range(self.samples))]
        self.iterated += 1
        return iter([position for position in order for _ in range(2)])


class InOwnOrder(Trainer):
    """Keeps the positions that each batch had."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        self.seen: list[list[int]] = []
        return Backwards(len(train_dataset))

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return Backwards(len(eval_dataset))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        inputs = dict(inputs)
        self.seen.append(inputs.pop("position").tolist())
        loss, prediction = model(**inputs)
        return (loss, (loss, prediction)) if return_outputs else loss


def numbered(samples: int) -> list[dict[str, torch.Tensor]]:
    return [{**row, "position": torch.tensor(index)} for index, row in enumerate(regression_rows(samples))]


def order_of(output_dir: str, resume: bool, **changes: Any) -> list[list[int]]:
    options = dict(num_train_epochs=2, max_steps=-1, remove_unused_columns=False, save_strategy="steps", save_steps=5)
    trainer = made(InOwnOrder, output_dir, data=numbered(6), **options, **changes)
    trainer.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-5") if resume else None)
    seen = trainer.seen
    trainer.seen = []
    assert len(trainer.predict(numbered(6)).label_ids) == 12  # each sample twice
    assert list(chain(*trainer.seen)) == [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
    trainer.engine.close()
    return seen


def test_a_sampler_is_followed_in_every_epoch_and_after_resuming(tmp_path: Path) -> None:
    first = [[5, 5], [4, 4], [3, 3], [2, 2], [1, 1], [0, 0]]
    second = [[0, 0], [5, 5], [4, 4], [3, 3], [2, 2], [1, 1]]
    assert order_of(str(tmp_path), False) == first + second
    assert order_of(str(tmp_path), True) == first[5:] + second


def order_of_rank(output_dir: str) -> list[list[int]]:
    trainer = made(
        InOwnOrder,
        output_dir,
        data=numbered(6),
        remove_unused_columns=False,
        per_device_train_batch_size=1,
        max_steps=7,
    )
    trainer.train()
    return trainer.seen


def test_two_ranks_share_the_order_of_a_sampler(tmp_path: Path) -> None:
    ranks = pool(2).run(order_of_rank, str(tmp_path))
    assert ranks[0] == ranks[1] == [[5], [4], [3], [2], [1], [0], [0]]


def test_the_default_sampler_is_the_order_of_the_loader(tmp_path: Path) -> None:
    class Same(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            found = super()._get_train_sampler(train_dataset)
            self.order = list(found)  # type: ignore[arg-type]
            return found

    trainer = made(Same, tmp_path, data=regression_rows(11))
    loader = trainer.get_train_dataloader()
    loader.start(0)
    assert list(chain(*loader.batch_sampler)) == trainer.order
    assert sorted(trainer.order) == list(range(11))


@pytest.mark.parametrize(("length", "text"), [(None, "has no length or length 0"), (3, "has length 3 and yielded 12")])
def test_a_sampler_with_a_wrong_length_is_refused(length: int | None, text: str, tmp_path: Path) -> None:
    class Wrong(SequentialSampler):
        def __len__(self) -> int:
            if length is None:
                raise TypeError
            return length

    class Own(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return Wrong(train_dataset)

    with pytest.raises(ConfigError, match=text):
        made(Own, tmp_path).train()


def test_a_loader_of_its_own_batch_size_is_trained_on(tmp_path: Path) -> None:
    sizes = []

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return self._get_dataloader(
                self.train_dataset, "Training", 2 * self._train_batch_size, self._get_train_sampler, is_training=True
            )

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            sizes.append(len(inputs["x"]))
            return super().training_step(model, inputs, num_items_in_batch)

    made(Own, tmp_path).train()
    assert sizes == [4, 4, 4]


# -- columns, saving, restoring ----------------------------------------------------------------------------------------


def test_columns_that_a_subclass_names_reach_the_collator(tmp_path: Path) -> None:
    from datasets import Dataset

    class Own(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            super()._set_signature_columns_if_needed()
            if "weight" not in (self._signature_columns or ()):
                self._signature_columns = [*(self._signature_columns or ()), "weight"]

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
            weights = inputs.pop("weight")
            assert weights.tolist() == inputs["labels"].tolist() and "unused" not in inputs
            return model(**inputs)[0]

    rows = regression_rows(12)
    columns = {name: torch.stack([row[name] for row in rows]).tolist() for name in ("x", "labels")}
    data = Dataset.from_dict({**columns, "weight": columns["labels"], "unused": columns["labels"]}).with_format("torch")
    trainer = made(Own, tmp_path, data=data)
    trainer.train()
    assert trainer.state.global_step == 3


class Saves(Trainer):
    """Writes a file of its own beside each checkpoint and reads it again."""

    read: Any = "nothing"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        path = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}" / "own.txt"
        assert model is self.model
        path.write_text(str(self._get_learning_rate()), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.read = checkpoint and (Path(checkpoint) / "own.txt").read_text(encoding="utf-8")


def test_what_a_subclass_saves_beside_a_checkpoint_is_there_to_be_restored(tmp_path: Path) -> None:
    trainer = made(Saves, tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    assert trainer.read is None
    resumed = made(Saves, tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.read == "0.1" and resumed.state.global_step == 4


class SavesItself(Trainer):
    """Runs the model while it saves, and writes the weights in its own format."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert output_dir is not None
        row = self.train_dataset[0]
        loss = self.model(**{name: value[None] for name, value in row.items()})[0]
        weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        torch.save({"loss": loss.item(), "weights": weights, "state": state_dict}, Path(output_dir) / "own.pt")
        super()._save(output_dir, state_dict)


def saved(output_dir: str, stage: int) -> dict[str, torch.Tensor]:
    trainer = made(SavesItself, output_dir, zero_stage=stage)
    trainer.train()
    Path(output_dir).mkdir(exist_ok=True)
    trainer.save_model()
    weights = whole_weights(trainer)
    trainer.evaluate()  # the hooks are back
    trainer.engine.close()
    return weights


@pytest.mark.parametrize("stage", [0, 3])
def test_an_override_of_save_sees_complete_weights_on_one_rank(stage: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (wanted, _) = pool(2).run(saved, str(tmp_path), stage)
    found = torch.load(tmp_path / "own.pt")
    for weights in (found["weights"], found["state"], load_file(str(tmp_path / "model.safetensors"))):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name].float(), wanted[name]) for name in wanted)
    assert found["loss"] > 0


def trained_with_own_files(output_dir: str, stage: int, checkpoint: str | None, keyword: str) -> dict[str, Any]:
    """The final weights; the first training writes a checkpoint at each step."""
    more = {"resume_from_checkpoint": checkpoint}
    cls = SavesItself if keyword == "_save" else SavesAll
    trainer = made(cls, output_dir, zero_stage=stage, save_strategy="steps", save_steps=1, max_steps=2)
    trainer.train(**more)
    weights = whole_weights(trainer)
    trainer.engine.close()
    return weights


class SavesAll(Trainer):
    """Adds a file to what ``save_model`` writes."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        assert output_dir is not None
        if self.args.should_save:
            weights = {name: torch.zeros(1) for name, _ in self.model.named_parameters()}
            torch.save({"weights": weights}, Path(output_dir) / "own.pt")


@pytest.mark.cases(2)
@pytest.mark.parametrize(("stage", "keyword"), [(0, "_save"), (3, "_save"), (2, "save_model")])
def test_checkpoints_have_what_an_override_saves_and_resume(stage: int, keyword: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
    from ds_trainer.checkpoint.protocol.manifest import Manifest

    (wanted, _) = pool(2).run(trained_with_own_files, str(tmp_path), stage, None, keyword)
    for step in (1, 2):
        checkpoint = tmp_path / f"checkpoint-{step}"
        assert {"own.pt", "model.safetensors", "trainer_state.json"} <= Manifest.read(checkpoint).files.keys()
        assert torch.load(checkpoint / "own.pt")["weights"].keys() == wanted.keys()
    export_checkpoint(checkpoint, tmp_path / "exported", 10**9)
    exported = load_file(str(tmp_path / "exported" / "model.safetensors"))
    assert exported.keys() == wanted.keys() and all(torch.equal(exported[name], wanted[name]) for name in wanted)
    first = str(tmp_path / "checkpoint-1")
    (resumed, _) = pool(2).run(trained_with_own_files, str(tmp_path / "resumed"), stage, first, keyword)
    assert all(torch.equal(resumed[name], wanted[name]) for name in wanted)


def saves_a_gathered_state(output_dir: str) -> str:
    trainer = made(Trainer, output_dir, model=tiny_llama(), data=RaggedTokens(8), zero_stage=3)
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model)
    try:
        trainer._save(output_dir)
    except ConfigError as error:
        refused = str(error)
    if trainer.args.should_save:
        trainer._save(f"{output_dir}/given", state_dict=state)
    trainer.save_model(f"{output_dir}/usual")
    trainer.engine.close()
    return refused


def test_scripts_write_weights_that_they_have_gathered(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    refused = pool(2).run(saves_a_gathered_state, str(tmp_path))
    assert all("Call save_model() on all ranks" in text for text in refused)
    usual, given = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("usual", "given"))
    assert usual.keys() == given.keys() and all(torch.equal(usual[name], given[name]) for name in usual)
    assert (tmp_path / "given" / "config.json").exists()
