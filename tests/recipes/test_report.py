"""Bits per byte, the compressors, and the verdict."""

from __future__ import annotations

import gzip
import lzma
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.recipes.report import Evaluation, bits_per_byte, compression_baselines, nats_per_token, report_text


def evaluation(loss: float, **bits: float) -> Evaluation:
    names = {"gzip": "gzip -9", "xz": "xz -9"}
    baselines = {names[name]: {"bytes": 100 * value, "bits_per_byte": value} for name, value in bits.items()}
    return Evaluation(loss=loss, targets=810, documents=10, bytes=800, baselines=baselines)


def test_a_uniform_guess_over_256_bytes_costs_8_bits() -> None:
    assert bits_per_byte(math.log(256), targets=1000, size=1000) == pytest.approx(8)


def test_separators_are_charged_to_the_model() -> None:
    assert bits_per_byte(math.log(2), targets=1010, size=1000) == pytest.approx(1.01)


@given(st.floats(1e-3, 20), st.integers(1, 10**9), st.integers(1, 10**9))
def test_nats_and_bits_are_inverse(loss: float, targets: int, size: int) -> None:
    assert nats_per_token(bits_per_byte(loss, targets, size), targets, size) == pytest.approx(loss)


def test_compressors_get_one_stream() -> None:
    text = b"def f(x):\n    return x\n" * 50
    packed = compression_baselines(text)
    assert list(packed) == ["gzip -9", "xz -9"]
    assert packed["gzip -9"]["bytes"] == len(gzip.compress(text, 9))
    assert packed["xz -9"]["bytes"] == len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    assert packed["xz -9"]["bits_per_byte"] == packed["xz -9"]["bytes"] * 8 / len(text)


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [
        (0.5, "The model beats gzip -9 and xz -9 on held-out text."),
        (1.2, "The model beats gzip -9 on held-out text, but not xz -9."),
        (2.0, "The model does NOT beat gzip -9 or xz -9 on held-out text; train longer."),
    ],
)
def test_the_verdict_is_honest(loss: float, verdict: str) -> None:
    measured = evaluation(loss, gzip=1.9, xz=1.6)
    assert measured.verdict() == verdict
    assert verdict in measured.table()
    content = measured.to_dict()
    assert content["verdict"] == verdict
    assert content["baselines"]["gzip -9"]["beaten"] == (measured.bits_per_byte < 1.9)
    assert content["bits_per_byte"] == pytest.approx(loss / math.log(2) * 810 / 800)


def test_equal_is_not_beaten() -> None:
    measured = evaluation(1.0)
    same = evaluation(1.0, gzip=measured.bits_per_byte)
    assert same.to_dict()["baselines"]["gzip -9"]["beaten"] is False


def test_without_baselines_there_is_no_verdict() -> None:
    measured = evaluation(1.0)
    assert measured.verdict() == ""
    assert measured.table().count("\n") == 1


def test_report_text() -> None:
    results = {
        "steps": 1200,
        "epochs": 1.5,
        "seconds": {"prepare": 1.0, "train": 300.4, "evaluate": 9.6, "save": 4.5, "other": 4.5, "total": 320.0},
        "sample": {"prompt": "def ", "text": "f(x):"},
        "output_dir": "runs/x",
    }
    text = report_text(results, evaluation(1.2, gzip=1.9, xz=1.6))
    parts = "setup 1.00 s, training 5 min 00 s, evaluation 9.60 s, saving 4.50 s, other 4.50 s"
    assert f"Finished 1,200 steps, 1.50 epochs, in 5 min 20 s ({parts})." in text
    assert "\ndef f(x):\n" in text
    assert "gzip -9      1.900 bits per byte" in text
    assert text.endswith("results.json are in runs/x")
    without = report_text({**results, "sample": None}, None)
    assert "No evaluation: set data.eval" in without
    assert "def f" not in without
