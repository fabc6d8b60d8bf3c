"""Trainings on ``tf.data`` pipelines, in a process of their own: ``python -m tests.support.tf_runs FOLDER``.

Prints one JSON object: what each case found.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from tests.support.models import Regression, regression_rows
from tests.support.pool import close_pools, pool

SAMPLES, STEPS = 44, 5


def pipeline(samples: int = SAMPLES, data: int = 0) -> Any:
    import tensorflow as tf

    rows = regression_rows(samples, data)
    named = {key: torch.stack([row[key] for row in rows]).numpy() for key in rows[0]}
    labels = named.pop("labels")
    return tf.data.Dataset.from_tensor_slices((named, labels))


def trainer_of(folder: str, world: int, train: Any, kind: Any = None, **values: Any) -> Any:
    from ds_trainer import TFTrainer, TrainingArguments

    options: dict[str, Any] = dict(
        per_device_train_batch_size=16 // world,
        per_device_eval_batch_size=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    args = TrainingArguments(folder, **{**options, **values})
    return (kind or TFTrainer)(Regression(), args=args, train_dataset=train, eval_dataset=pipeline(29, 1))


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained(folder: str, world: int, shuffled: bool) -> dict[str, Any]:
    from ds_trainer import TFTrainer

    class InOrder(TFTrainer):
        def get_train_tfdataset(self) -> Any:
            return self.train_dataset.prefetch(2)

    trainer = trainer_of(folder, world, pipeline(), TFTrainer if shuffled else InOrder)
    trainer.train()
    found = {"losses": losses_of(trainer), **trainer.evaluate()}
    predictions = trainer.predict(pipeline(29, 1)).predictions
    found["predicted"] = [len(predictions), float(predictions.sum())]
    trainer.engine.close()
    return found


def resumed(folder: str, stop: int) -> dict[str, Any]:
    uninterrupted = trainer_of(f"{folder}/whole", 1, pipeline())
    uninterrupted.train()
    values = {"save_strategy": "steps", "save_steps": stop}
    first = trainer_of(f"{folder}/cut{stop}", 1, pipeline(), max_steps=stop, **values)
    first.train()
    second = trainer_of(f"{folder}/cut{stop}", 1, pipeline(), **values)
    second.train(resume_from_checkpoint=True)
    return {"whole": losses_of(uninterrupted), "resumed": losses_of(second)}


def in_a_plain_loop() -> dict[str, Any]:
    """The oracle: the pipeline's samples in their order, in a torch loop."""
    model, rows, losses = Regression(), regression_rows(SAMPLES), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for start in (0, 16, 32, 0, 16):
        batch = rows[start : start + 16]
        optimizer.zero_grad()
        loss, _ = model(**{key: torch.stack([row[key] for row in batch]) for key in batch[0]})
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rows = regression_rows(29, 1)
    with torch.no_grad():
        loss, predictions = model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]})
    return {"losses": losses, "eval_loss": loss.item(), "predicted": [29, float(predictions.sum())]}


def refused(folder: str) -> dict[str, str]:
    """What each mistake is answered with."""
    import tensorflow as tf

    from ds_trainer import TFTrainer

    class Own(TFTrainer):
        def run_model(self, features: Any, labels: Any, training: bool) -> Any:
            return super().run_model(features, labels, training)

    class Native(tf.Module):
        pass

    mistakes = {
        "batched": lambda: trainer_of(folder, 1, pipeline().batch(4).prefetch(1)).get_train_dataloader(),
        "endless evaluation": lambda: trainer_of(folder, 1, pipeline()).evaluate(pipeline().repeat()),
        "endless, no max_steps": lambda: trainer_of(folder, 1, pipeline().repeat(), max_steps=-1),
        "workers": lambda: trainer_of(folder, 1, pipeline(), dataloader_num_workers=2),
        "run_model": lambda: trainer_of(folder, 1, pipeline(), Own),
        "native": lambda: TFTrainer(Native()),
        "triples": lambda: trainer_of(folder, 1, tf.data.Dataset.zip((pipeline(), pipeline(), pipeline()))).train(),
        "strings": lambda: trainer_of(folder, 1, tf.data.Dataset.from_tensor_slices(["a"])).train(),
    }
    return {name: message_of(mistake) for name, mistake in mistakes.items()}


def unseeded(folder: str, world: int) -> str:
    import tensorflow as tf

    tf.random.set_seed(torch.distributed.get_rank())
    return message_of(lambda: trainer_of(folder, world, pipeline().shuffle(SAMPLES).take(SAMPLES)).train())


def message_of(mistake: Any) -> str:
    try:
        mistake()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def main(folder: str) -> None:
    """Print what the cases found."""
    found: dict[str, Any] = {}
    try:
        found["oracle"] = pool(1).run(in_a_plain_loop, timeout=600)
        found["in order, 1"] = pool(1).run(trained, f"{folder}/a", 1, False, timeout=600)
        found["shuffled, 1"] = pool(1).run(trained, f"{folder}/b", 1, True, timeout=600)
        found["resumed in epoch 0"] = pool(1).run(resumed, f"{folder}/c", 2, timeout=600)
        found["resumed in epoch 1"] = pool(1).run(resumed, f"{folder}/d", 4, timeout=600)
        found["refused"] = pool(1).run(refused, f"{folder}/e", timeout=600)
        found["in order, 2"] = pool(2).run(trained, f"{folder}/f", 2, False, timeout=600)
        found["shuffled, 2"] = pool(2).run(trained, f"{folder}/g", 2, True, timeout=600)
        found["unseeded, 2"] = pool(2).run(unseeded, f"{folder}/h", 2, timeout=600)
    finally:
        close_pools()
    print("RESULT" + json.dumps(found))


if __name__ == "__main__":
    import sys

    from tests.support import tf_runs  # the ranks know this module by its name

    tf_runs.main(sys.argv[1])
