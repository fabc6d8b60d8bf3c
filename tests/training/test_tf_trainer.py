"""Keras models and tf.data pipelines in the Trainer.

All of it runs in processes of their own: the backend is chosen once in a process, and neither library must get into the
ranks that other tests use.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.test_package import ROOT


def found_by(module: str, *arguments: str) -> dict[str, Any]:
    """What ``python -m module`` printed."""
    environment = {**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", module, *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    results = [line for line in completed.stdout.splitlines() if line.startswith("RESULT")]
    assert results, completed.stdout[-3000:] + completed.stderr[-3000:]
    found: dict[str, Any] = json.loads(results[0].removeprefix("RESULT"))
    return found


# -- Keras models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keras_runs() -> dict[str, Any]:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    return found_by("tests.support.keras_runs")


EXACT = ["world 1 stage 0", "world 1 stage 1 accumulated", "world 2 stage 0", "world 2 stage 2", "world 2 stage 3"]


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("case", EXACT)
def test_losses_are_those_of_a_torch_loop_over_the_same_model(case: str, keras_runs: dict[str, Any]) -> None:
    """Loss with regularisation, gradient norms, and every weight under its Keras name; the ragged batch too."""
    (wanted,) = keras_runs["oracle"]
    for found in keras_runs[case]:
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        assert found["weights"].keys() == wanted["weights"].keys()
        for name, numbers in found["weights"].items():
            assert numbers == pytest.approx(wanted["weights"][name], abs=5e-4), name
        assert found["eval"] == pytest.approx(keras_runs[EXACT[0]][0]["eval"], rel=1e-5)


@pytest.mark.extended
def test_bfloat16_is_close(keras_runs: dict[str, Any]) -> None:
    (wanted,), (found,) = keras_runs["oracle"], keras_runs["world 1 bf16"]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-2)
    assert found["losses"] != pytest.approx(wanted["losses"], rel=1e-6)  # it is not float32 in disguise


@pytest.mark.parametrize("case", ["state, stage 0", "state, stage 3", "state, bf16"])
def test_keras_modes_and_state_are_handled(case: str, keras_runs: dict[str, Any]) -> None:
    """Dropout in training only; moving averages really move, where Keras sees them, and come back from the file."""
    for found in keras_runs[case]:
        assert found["dropout"] > 0.1 and found["still"] == 0.0
        assert found["moved"] > 1.0 and found["keras sees it"]
        half = case.endswith("bf16")
        kind = "bfloat16" if half else "float32"
        assert (found["dtypes"], found["compute"], found["logits"]) == ([f"torch.{kind}"], kind, f"torch.{kind}")
        assert found["reloaded"] < (0.1 if half else 1e-5)


def test_ranks_draw_from_their_own_generators(keras_runs: dict[str, Any]) -> None:
    one, other = (found["mask of rank"] for found in keras_runs["state, stage 3"])
    assert one != other


RAW = """
import keras, pytest
from ds_trainer import ConfigError, KerasModule, TFTrainer, Trainer, TrainingArguments
model = keras.Sequential([keras.layers.Dense(2)])
for make in (lambda: Trainer(model), lambda: Trainer(model_init=lambda: model)):
    with pytest.raises(ConfigError, match="ignores train\\\\(\\\\) and eval\\\\(\\\\): pass ds_trainer.KerasModule"):
        make()
with pytest.raises(ConfigError, match="no weights yet"):
    KerasModule(model)
model.build((None, 3))
module = KerasModule(model)
with pytest.raises(ConfigError, match="compile\\\\(loss"):
    module(inputs=model.layers[0].kernel.value.T, labels=model.layers[0].bias.value)
print([name for name, _ in module.named_parameters()])
"""


@pytest.mark.extended
def test_a_raw_keras_model_is_rejected() -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-c", RAW]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert completed.stdout.strip().endswith("['dense.kernel', 'dense.bias']"), completed.stderr[-2000:]


def test_importing_the_trainer_imports_neither_keras_nor_tensorflow() -> None:
    code = "import sys; from ds_trainer import TFTrainer; print({'keras', 'tensorflow'} & set(sys.modules))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert completed.stdout.strip().endswith("set()")


# -- tf.data -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tf_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    return found_by("tests.support.tf_runs", str(tmp_path_factory.mktemp("tf")))


@pytest.mark.parametrize("world", [1, 2])
def test_a_pipeline_trains_like_a_torch_loop(world: int, tf_runs: dict[str, Any]) -> None:
    (wanted,) = tf_runs["oracle"]
    for found in tf_runs[f"in order, {world}"]:
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5) and found["eval_items"] == 29
        assert found["predicted"] == pytest.approx(wanted["predicted"], rel=1e-5)


def test_every_rank_shuffles_the_same_way(tf_runs: dict[str, Any]) -> None:
    (one,) = tf_runs["shuffled, 1"]
    for found in tf_runs["shuffled, 2"]:
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert one["losses"] != pytest.approx(tf_runs["oracle"][0]["losses"], rel=1e-3)
    assert all("The ranks read different data" in message for message in tf_runs["unseeded, 2"])


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_pipeline_resumes_in_the_same_order(epoch: int, tf_runs: dict[str, Any]) -> None:
    (found,) = tf_runs[f"resumed in epoch {epoch}"]
    assert found["resumed"] == pytest.approx(found["whole"], rel=1e-6)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("batched", "append unbatch()"),
        ("endless evaluation", "add take(n)"),
        ("endless, no max_steps", "Set max_steps"),
        ("workers", "TensorFlow must not be forked"),
        ("run_model", "override compute_loss"),
        ("native", "KERAS_BACKEND=torch"),
        ("triples", "(features, labels)"),
        ("strings", "can't convert np.ndarray"),
    ],
)
def test_mistakes_are_rejected(mistake: str, message: str, tf_runs: dict[str, Any]) -> None:
    assert message in tf_runs["refused"][0][mistake]
