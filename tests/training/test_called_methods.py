"""Private methods of transformers' Trainer that scripts call: they work, or name what to write instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.training.overrides.called_methods import CalledMethods
from ds_trainer.training.overrides.private_methods import NOT_CALLED, REFUSED, VALUES, PrivateMethods
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool
from tests.support.runs import whole_weights
from tests.training.test_private_methods import made


def test_the_page_has_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "private-methods.md").read_text(encoding="utf-8")
    own = [name for cls in (PrivateMethods, CalledMethods) for name in vars(cls) if re.match("_[a-z]", name)]
    assert [name for name in (*own, *VALUES, "_memory_tracker") if f"`{name}`" not in page] == []
    for heading, table in (("## Not called", NOT_CALLED), ("## Refused", REFUSED)):
        section = page.partition(heading)[2].partition("\n## ")[0]
        listed = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
        assert listed == {name: f"{text[0].upper()}{text[1:]}." for name, text in table.items()}
    assert not set(NOT_CALLED) & set(REFUSED) and not set(VALUES) & {*NOT_CALLED, *REFUSED}
    assert not [name for name in REFUSED if hasattr(Trainer, name)]


def test_every_member_of_the_reference_works_or_names_what_to_write(tmp_path: Path) -> None:
    """Members of transformers' class, and the attributes of its instance after a training."""
    import transformers

    args = transformers.TrainingArguments(str(tmp_path / "theirs"), max_steps=1, use_cpu=True, report_to="none")
    theirs = transformers.Trainer(Regression(), args, train_dataset=regression_rows(4))
    theirs.train()
    trainer = made(Trainer, tmp_path)
    trainer.train()
    names = {name for name in (*dir(transformers.Trainer), *vars(theirs)) if not name.startswith("__")}
    missing = {name for name in names if not hasattr(trainer, name)}
    assert missing <= {*NOT_CALLED, *REFUSED}
    for name in missing:
        with pytest.raises(AttributeError, match=re.escape({**NOT_CALLED, **REFUSED}[name])):
            getattr(trainer, name)
    for name in names - missing - {"deepspeed"}:  # the engine is None in transformers
        assert callable(getattr(trainer, name)) == callable(getattr(theirs, name)), name


class Distills(Trainer):
    """Places a teacher, and gathers results, with private methods."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.teacher = Regression(seed=1)
        self._move_model_to_device(self.teacher, self.args.device)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        loss, prediction = model(**inputs)
        with torch.no_grad():
            aim = self._wrap_model(self.teacher, training=False)(**self._prepare_input(inputs))[1]
        return loss + (prediction - aim).pow(2).mean()

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        self._memory_tracker.start()
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics


def called(output_dir: str) -> dict[str, Any]:
    trainer = made(Distills, output_dir, model=Regression(), per_device_train_batch_size=1)
    trainer.train()
    rank = trainer.args.process_index
    ragged = torch.full((1, 2 + rank), float(rank))
    found = {
        "weights": whole_weights(trainer),
        "gathered": trainer._nested_gather(torch.tensor([rank, rank])),
        "padded": trainer._pad_across_processes(ragged),
        "numbers": trainer._gather_and_numpify((torch.tensor([rank]),), "x"),
        "items": float(trainer._get_num_items_in_batch([{"x": torch.zeros(3, 6)}], "cpu")),
        "norm": trainer._get_grad_norm(trainer.model) == trainer.engine.grad_norm(),
        "wrapped": trainer._wrap_model(trainer.model) is trainer.model_wrapped,
        "metrics": trainer.evaluate(),
    }
    trainer.engine.close()
    return found


def test_private_methods_that_scripts_call(tmp_path: Path) -> None:
    model, teacher = Regression(), Regression(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = made(Trainer, tmp_path, per_device_train_batch_size=2)
    loader = trainer.get_train_dataloader()
    loader.start(0)
    for _, batch in zip(range(3), loader, strict=False):
        loss, prediction = model(**batch)
        optimizer.zero_grad()
        (loss + (prediction - teacher(**batch)[1].detach()).pow(2).mean()).backward()
        optimizer.step()
    ranks = pool(2).run(called, str(tmp_path / "two"))
    for found in ranks:
        for name, p in model.named_parameters():
            torch.testing.assert_close(found["weights"][name], p.detach(), rtol=1e-5, atol=1e-6)
        assert found["gathered"].tolist() == [0, 0, 1, 1] and found["numbers"][0].tolist() == [0, 1]
        assert found["items"] == 2 * 3 and found["norm"] and found["wrapped"] and "eval_loss" in found["metrics"]
    assert ranks[0]["padded"].tolist() == [[0.0, 0.0, -100.0]] and ranks[1]["padded"].tolist() == [[1.0, 1.0, 1.0]]


def test_overrides_of_an_input_and_of_the_item_count_are_called(tmp_path: Path) -> None:
    class Own(Trainer):
        def _prepare_input(self, data: Any) -> Any:
            data = super()._prepare_input(data)
            return {**data, "x": data["x"] * 0}

        def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
            return 2 * super()._get_num_items_in_batch(batch_samples, device)

    model = Regression()
    trainer = made(Own, tmp_path, model=model)
    trainer.train()
    before = Regression().layers[0].weight
    assert torch.equal(trainer.model.layers[0].weight, before)  # x is 0: its weights have no gradient
    plain = made(Trainer, tmp_path / "plain")
    plain.train()
    assert trainer.state.log_history[0]["loss"] != plain.state.log_history[0]["loss"]
