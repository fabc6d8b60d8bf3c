"""Trainings of a Keras model, in a process of their own: the backend is chosen by the environment, once.

``KERAS_BACKEND=torch python -m tests.support.keras_runs`` prints one JSON object: what each case found.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from tests.support.pool import close_pools, pool
from tests.support.runs import whole_weights

TIMEOUT = 600.0  # seconds: importing everything may take minutes on a busy machine
SAMPLES, STEPS, GLOBAL_BATCH = 44, 4, 16  # the third batch of an epoch is ragged


def rows(samples: int = SAMPLES, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 20, (samples, 6), generator=generator)
    return [{"inputs": row, "labels": (row.sum() + row[0]) % 3} for row in tokens]


def plain_model() -> Any:
    """Embedding, attention, a nested model, regularisation; 3 classes."""
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    nested = keras.Sequential(
        [layers.Dense(24, activation="gelu", name="up"), layers.LayerNormalization(name="ln")], name="nested"
    )
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    hidden = layers.Embedding(20, 16, name="embedding")(tokens)
    hidden = layers.MultiHeadAttention(2, 8, name="attention")(hidden, hidden)
    hidden = layers.LSTM(16, name="lstm")(nested(hidden))
    logits = layers.Dense(3, name="head", kernel_regularizer=keras.regularizers.L2(1e-2))(hidden)
    return compiled(keras.Model(tokens, logits))


def normed_model() -> Any:
    """With state that training changes by itself: moving averages, random numbers."""
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return compiled(
        keras.Sequential(
            [
                keras.Input((6,), name="tokens"),
                layers.Dense(16, activation="relu", name="first"),
                layers.BatchNormalization(name="bn", momentum=0.5),
                layers.Dropout(0.5, name="drop"),
                layers.Dense(3, name="head"),
            ]
        )
    )


def compiled(model: Any) -> Any:
    import keras

    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def plainly() -> dict[str, Any]:
    """The oracle: the Keras model itself in a torch loop, without any of our code."""
    model, data = plain_model(), rows()
    weights = {variable.path: variable.value for variable in model.trainable_variables}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, weight_decay=0.0)
    losses: list[float] = []
    norms: list[float] = []
    for batch in batches(data):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (STEPS - len(losses)) / STEPS
        optimizer.zero_grad()
        logits = model(torch.stack([row["inputs"] for row in batch]), training=True)
        loss = torch.nn.functional.cross_entropy(logits, torch.stack([row["labels"] for row in batch]))
        loss = loss + 1e-2 * weights["head/kernel"].square().sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), float("inf"))))
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": {name: checksum(w) for name, w in weights.items()}}


def batches(data: list[Any]) -> Iterator[list[Any]]:
    done, epoch = 0, 0
    while True:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(42 + epoch)).tolist()
        for start in range(0, len(data), GLOBAL_BATCH):
            if done == STEPS:
                return
            yield [data[index] for index in order[start : start + GLOBAL_BATCH]]
            done += 1
        epoch += 1


def checksum(tensor: torch.Tensor) -> list[float]:
    """Norm, and the product with fixed numbers: what is compared of a tensor."""
    flat = tensor.detach().double().flatten().cpu()
    return [float(flat.norm()), float(flat @ torch.arange(1.0, len(flat) + 1, dtype=torch.float64).cos())]


def trainer_of(model: Any, world: int, **values: Any) -> Any:
    from ds_trainer import TFTrainer, TrainingArguments

    options: dict[str, Any] = dict(
        per_device_train_batch_size=GLOBAL_BATCH // world // values.get("gradient_accumulation_steps", 1),
        learning_rate=1e-2,
        max_grad_norm=0.0,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    args = TrainingArguments(values.pop("output_dir", None) or tempfile.mkdtemp(), **{**options, **values})
    return TFTrainer(model, args=args, train_dataset=rows(), eval_dataset=rows(29, 1))


def trained(world: int, stage: int, accumulation: int = 1, **values: Any) -> dict[str, Any]:
    """What a training of :func:`plain_model` logged, and its weights under Keras' names."""
    trainer = trainer_of(plain_model(), world, zero_stage=stage, gradient_accumulation_steps=accumulation, **values)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = {name.replace(".", "/"): checksum(w) for name, w in whole_weights(trainer).items()}
    found = {"losses": [e["loss"] for e in logs], "norms": [e["grad_norm"] for e in logs], "weights": weights}
    found["eval"] = trainer.evaluate()["eval_loss"]
    trainer.engine.close()
    return found


def state_of_its_own(world: int, stage: int, **values: Any) -> dict[str, Any]:
    """Moving averages, dropout by mode and by rank, and that they come back from a file."""
    from ds_trainer import KerasModule
    from ds_trainer.utils import distributed

    trainer = trainer_of(normed_model(), world, zero_stage=stage, **values)
    trainer.train()
    x = torch.stack([row["inputs"] for row in rows(8)]).float()
    y = torch.stack([row["labels"] for row in rows(8)])
    torch.manual_seed(distributed.rank())
    once, other = (trainer.run_model(x, y, training=True)[1].detach().float() for _ in range(2))
    still = [trainer.run_model(x, y, training=False)[1].detach().float() for _ in range(2)]
    mean = dict(trainer.model.named_buffers())["bn.moving_mean"]
    trainer.save_model(trainer.args.output_dir)
    torch.distributed.barrier()
    fresh = KerasModule(normed_model())
    if distributed.rank() == 0:
        from safetensors.torch import load_file

        fresh.load_state_dict(load_file(f"{trainer.args.output_dir}/model.safetensors"))
        fresh.keras_model.save(f"{trainer.args.output_dir}/whole.keras")
    restored = fresh.eval()(inputs=x)["logits"].detach() if distributed.rank() == 0 else still[0]
    found = {
        "dropout": float((once - other).abs().max()),
        "still": float((still[0] - still[1]).abs().max()),
        "moved": float(mean.float().abs().max()),
        "keras sees it": trainer.model.keras_model.get_layer("bn").moving_mean.value is mean,
        "dtypes": sorted({str(p.dtype) for p in trainer.model.parameters()}),
        "compute": trainer.model.keras_model.get_layer("head").compute_dtype,
        "logits": str(trainer.run_model(x, y, training=False)[1].dtype),
        "mask of rank": float(once.double().sum()),
        "reloaded": float((restored - still[0]).abs().max()),
    }
    trainer.engine.close()
    return found


CASES: dict[str, Any] = {
    "world 1 stage 0": (1, trained, {"stage": 0}),
    "world 1 stage 1 accumulated": (1, trained, {"stage": 1, "accumulation": 4}),
    "world 2 stage 0": (2, trained, {"stage": 0}),
    "world 2 stage 2": (2, trained, {"stage": 2, "accumulation": 2}),
    "world 2 stage 3": (2, trained, {"stage": 3}),
    "world 1 bf16": (1, trained, {"stage": 1, "bf16": True}),
    "state, stage 0": (1, state_of_its_own, {"stage": 0}),
    "state, stage 3": (2, state_of_its_own, {"stage": 3}),
    "state, bf16": (1, state_of_its_own, {"stage": 1, "bf16": True}),
}


def on_rank(kind: str, world: int, values: dict[str, Any]) -> Any:
    function = {"trained": trained, "state_of_its_own": state_of_its_own}[kind]
    return function(world, **values)


def main(names: list[str]) -> None:
    """Print the results of the cases, by name."""
    found: dict[str, Any] = {}
    try:
        if not names:
            found["oracle"] = pool(1).run(plainly, timeout=TIMEOUT)
        for name, (world, function, values) in CASES.items():
            if names and name not in names:
                continue
            found[name] = pool(world).run(on_rank, function.__name__, world, values, timeout=TIMEOUT)
    finally:
        close_pools()
    print("RESULT" + json.dumps(found))


if __name__ == "__main__":
    import sys

    from tests.support import keras_runs  # the ranks know this module by its name

    keras_runs.main(sys.argv[1:])
