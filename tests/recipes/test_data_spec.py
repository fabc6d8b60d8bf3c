"""The section ``data`` of a recipe: sources, what goes together, and problems with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_trainer.recipes.recipe import Recipe, load_recipe
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.utils.errors import ConfigError

GOOD = """\
model: {path: m}
data:
  train:
    - path: a.jsonl
      weight: 3
    - {path: [b.csv, c], name: more, weight: 1, limit: 10, text_key: body, exclude: x}
  held_out: 0.05
  max_length: 4K
  exclude: y
arguments: {output_dir: out}
"""


def load(folder: Path, text: str, *words: str) -> Recipe:
    (folder / "r.yaml").write_text(text)
    return load_recipe(folder / "r.yaml", words)


def test_sources_have_their_own_keys_and_those_of_the_section(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    assert recipe.data.sources("train") == [
        ("data.train[0]", SourceSpec(path=("a.jsonl",), weight=3.0, exclude=("y",))),
        (
            "data.train[1]",
            SourceSpec(("b.csv", "c"), "more", weight=1.0, limit=10, text_key="body", exclude=("y", "x")),
        ),
    ]
    assert recipe.where("data.train[0].weight") == f"{tmp_path / 'r.yaml'}:5"
    assert recipe.fine_tunes
    assert recipe.tokens_per_sample == 4096
    assert recipe.training_arguments().max_length == 4096


def test_a_list_is_the_training_data(tmp_path: Path) -> None:
    text = "model: {path: m}\ndata:\n  - a.jsonl\n  - {path: b.jsonl}\narguments: {max_length: 64}\n"
    recipe = load(tmp_path, text, "--data.held_out=7")
    assert [spec.path for _, spec in recipe.data.sources("train")] == [("a.jsonl",), ("b.jsonl",)]
    assert (recipe.data.held_out, recipe.tokens_per_sample, recipe.fine_tunes) == (7, 64, True)


def test_text_in_blocks_is_no_fine_tuning(tmp_path: Path) -> None:
    recipe = load(tmp_path, "model: {path: m}\ndata: {train: a, sequence_length: 32}\narguments: {max_length: 64}\n")
    assert not recipe.fine_tunes
    assert recipe.tokens_per_sample == 32


def test_nothing_held_out(tmp_path: Path) -> None:
    data = load(tmp_path, GOOD, "--data.held_out=0").data
    assert data.held_out is None and not data.has_eval
    data = load(tmp_path, GOOD.replace("held_out: 0.05", "held_out: 0\n  eval: e")).data  # an override of a recipe
    assert data.has_eval
    assert load(tmp_path, GOOD, "--data.held_out=null", "--data.held_out_every=0").data.held_out_every is None


@pytest.mark.parametrize("given", ["last_turn", "[user, assistant]", "assistant"])
def test_train_on_is_a_word_or_roles(tmp_path: Path, given: str) -> None:
    train_on = load(tmp_path, GOOD, f"--data.train_on={given}").data.train_on
    assert train_on == (("user", "assistant") if given.startswith("[") else given)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("      weight: 3", "      wieght: 3", "r.yaml:5: unknown key 'data.train[0].wieght'. Did you mean 'weight'?"),
        ("      weight: 3", "      weight: many", "r.yaml:5: data.train[0].weight: expected float or null, got 'many'"),
        ("      weight: 3", "      weight: -1", "data.train[0]: weight=-1.0 must be a positive number"),
        (
            "      weight: 3\n",
            "",
            "data.train[0]: has no weight, but other sources have; give all of them one, or none.",
        ),
        ("      weight: 3", "      weight: 3\n      name: more", "data.train: two sources have the name 'more'."),
        ("limit: 10", "limit: 0", "data.train[1]: limit=0 must be 1 or more."),
        ("path: [b.csv, c]", "path: []", "data.train[1]: path is missing"),
        ("limit: 10", "format: xls", "r.yaml:6: data.train[1].format: expected one of 'auto', 'text', 'jsonl', 'json'"),
        ("limit: 10", "kind: chat", "r.yaml:6: data.train[1].kind: expected one of 'auto', 'text', 'messages'"),
        ("held_out: 0.05", "held_out: 1.5", "data.held_out=1.5 must be a number of samples, or a share between 0 and"),
        ("held_out: 0.05", "held_out: -1", "data.held_out=-1 must be a number of samples"),
        ("held_out: 0.05", "held_out: 5\n  eval: e", "data: 'eval' (e) and 'held_out' (5) both select evaluation data"),
        ("held_out: 0.05", "held_out_every: 5", "data.held_out_every=5 is for text in blocks (sequence_length); use"),
        ("max_length: 4K", "max_length: 4X", "data.max_length='4X' must be a positive number of tokens"),
        ("max_length: 4K", "max_length: 4K\n  sequence_length: 9", "'sequence_length' (9) makes blocks of text, 'max_"),
        ("out}", "out, max_length: 9}", "data.max_length=4K and arguments.max_length=9 differ; remove one."),
        ("max_length: 4K", "sequence_length: 9", "data: held_out, train with weight, limit or kind are for samples of"),
        ("max_length: 4K", "bad_lines: skip", "data.sequence_length is missing, or 0; set it to the number of tokens"),
        ("exclude: y", "bad_lines: maybe", "r.yaml:9: data.bad_lines: expected one of 'error', 'skip', got 'maybe'"),
        ("exclude: y", "long_samples: cut", "r.yaml:9: data.long_samples: expected one of 'truncate', 'drop', 'split'"),
        ("exclude: y", "train_on: robots", "data.train_on: 'robots' is no role; roles are system, user, assistant"),
    ],
)
def test_one_mistake_gives_one_problem(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD.replace(old, new))
    assert len(caught.value.problems) == 1, caught.value.problems
    assert problem in caught.value.problems[0]
    assert caught.value.problems[0].startswith(f"{tmp_path / 'r.yaml'}")
