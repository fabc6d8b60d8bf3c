"""``TFTrainingArguments`` of early transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import ConfigError, HfArgumentParser, TFTrainer, TFTrainingArguments, TrainingArguments
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool


def arguments(**values: Any) -> TFTrainingArguments:
    return TFTrainingArguments("out", use_cpu=True, **values)


def test_poly_power_is_a_schedule() -> None:
    args = arguments(poly_power=2.0, learning_rate=1e-3)
    wanted = {"power": 2.0, "lr_end": 0.0}
    assert (args.lr_scheduler_type, args.lr_scheduler_kwargs) == ("polynomial", wanted)
    args.complete()  # a second time changes nothing
    assert (args.lr_scheduler_type, args.lr_scheduler_kwargs) == ("polynomial", wanted)
    plain = arguments()
    assert isinstance(plain, TrainingArguments)
    assert (plain.lr_scheduler_type, plain.lr_scheduler_kwargs) == ("linear", None)
    with pytest.raises(ConfigError, match=r"poly_power=2\.0 contradicts lr_scheduler_type=cosine"):
        arguments(poly_power=2.0, lr_scheduler_type="cosine")
    with pytest.raises(ConfigError, match="poly_power=0 must be a positive number"):
        arguments(poly_power=0)


def test_the_schedule_decays_like_a_polynomial() -> None:
    import torch

    from ds_trainer.optim.schedules import build_schedule

    args = arguments(poly_power=2.0, learning_rate=1.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(args.lr_scheduler_type, optimizer, 0, 10, dict(args.lr_scheduler_kwargs or {}))
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([(1 - step / 10) ** 2 for step in range(10)], abs=1e-9)


def test_evaluate_during_training_is_a_strategy() -> None:
    args = arguments(evaluate_during_training=True, eval_steps=7)
    assert (args.eval_strategy, args.eval_steps, args.do_eval) == ("steps", 7, True)
    assert arguments(evaluate_during_training=False).eval_strategy == "no"
    with pytest.raises(ConfigError, match="evaluate_during_training=True contradicts eval_strategy=epoch"):
        arguments(evaluate_during_training=True, eval_strategy="epoch")


def trained(output_dir: str, early: bool) -> list[tuple[int, float]]:
    kind, schedule = (
        TrainingArguments,
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 0.0}},
    )
    if early:
        kind, schedule = TFTrainingArguments, {"poly_power": 2.0, "evaluate_during_training": True, "eval_steps": 2}
    args = kind(output_dir, use_cpu=True, max_steps=4, logging_steps=1, save_strategy="no", optim="sgd", **schedule)
    trainer = TFTrainer(Regression(), args=args, train_dataset=regression_rows(32), eval_dataset=regression_rows(8))
    trainer.train()
    trainer.engine.close()
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == (2 if early else 0)
    return [(entry["learning_rate"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_takes_them(tmp_path: Path) -> None:
    (found,), (wanted,) = (pool(1).run(trained, str(tmp_path / str(early)), early) for early in (True, False))
    assert found == wanted and len(found) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tpu_name": "t"}, "tpu_name=t names a TPU.* start one process per GPU"),
        ({"tpu_zone": "z"}, "tpu_zone=z names a TPU"),
        ({"gcp_project": "p"}, "gcp_project=p names a TPU"),
        ({"xla": True}, r"xla=True compiles TensorFlow graphs.* Use torch_compile=True\."),
        ({"debug": True}, "debug=True traced TensorFlow graphs.* Use torch.profiler"),
        ({"poly_power": "steep"}, "poly_power='steep': expected float"),
        ({"seed": -1}, "seed=-1 must be"),
    ],
)
def test_what_has_no_meaning_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        arguments(**values)
    assert len(error.value.problems) == 1


def test_an_early_script_runs() -> None:
    """The lines of transformers' early run_tf_glue.py that touch the arguments."""
    argv = "--output_dir o --poly_power 1.0 --per_gpu_train_batch_size 4 --logging_dir l --debug underflow_overflow"
    with pytest.warns(FutureWarning):
        (args,) = HfArgumentParser(TFTrainingArguments).parse_args_into_dataclasses(argv.split(), False, False)
    assert (args.n_replicas, bool(args.n_replicas > 1), args.fp16, args.per_device_train_batch_size) == (
        1,
        False,
        False,
        4,
    )
    with args.strategy.scope() as strategy:
        assert strategy.num_replicas_in_sync == 1
    assert arguments(debug=False).debug == []


def test_importing_it_imports_no_tensorflow() -> None:
    code = (
        "import sys; from ds_trainer import TFTrainingArguments; "
        "sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
