"""``tools/build_deepspeed_schema.py``: the description in the package is that of the pinned DeepSpeed."""

from __future__ import annotations

import importlib.metadata
import json

from build_deepspeed_schema import build_schema

from ds_trainer.config.schema import SNAPSHOT


def test_the_description_is_up_to_date() -> None:
    """When this fails: python tools/build_deepspeed_schema.py"""
    snapshot = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert snapshot["deepspeed"] == importlib.metadata.version("deepspeed")
    built = json.loads(json.dumps(build_schema()))
    if not importlib.metadata.version("torch").startswith("2.13."):  # 2.14 adds LBFGS's maximize
        known = snapshot["types"]["optimizer"]
        for name, one in built["types"]["optimizer"].items():
            one["fields"] = {field: one["fields"][field] for field in one["fields"] if field in known[name]["fields"]}
    assert snapshot == built
