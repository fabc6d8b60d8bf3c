"""The files of a recipe's data section, their order, and the held-out ones."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.language_model_job import Corpus
from ds_trainer.utils.errors import ConfigError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory ``src`` with some files, seen from the working directory."""
    for name in (
        "b.py",
        "a.py",
        "sub/c.py",
        "sub/tests/d.py",
        "sub/__pycache__/e.py",
        ".hidden/f.py",
        "z.md",
        "empty.py",
    ):
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if "empty" in name else f"<{name}>")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec(*train: str, **fields: object) -> DataSpec:
    return DataSpec(train=train, sequence_length=8, **fields)  # type: ignore[arg-type]


def texts(corpus: Corpus, split: str = "train") -> list[str]:
    documents = corpus.train_documents() if split == "train" else corpus.eval_documents()
    return [document.data.decode() for document in documents]


def refused(data: DataSpec) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        corpus = Corpus(data)
        texts(corpus), texts(corpus, "eval")
    return caught.value.problems


def test_a_directory_by_relative_path(tree: Path) -> None:
    assert texts(Corpus(spec("src"))) == ["<a.py>", "<b.py>", "<sub/c.py>", "<sub/tests/d.py>", "<z.md>"]


def test_pattern_and_exclude(tree: Path) -> None:
    assert texts(Corpus(spec("src", file_pattern="*.py", exclude=("tests",)))) == ["<a.py>", "<b.py>", "<sub/c.py>"]
    assert texts(Corpus(spec("src", exclude=("sub/*", "z.*")))) == ["<a.py>", "<b.py>"]


def test_files_keep_the_recipes_order_and_come_once(tree: Path) -> None:
    assert texts(Corpus(spec("src/b.py", "src/a.py", "src/../src/b.py"))) == ["<b.py>", "<a.py>"]
    assert texts(Corpus(spec("src/b.py", "src", exclude=("sub", "z.md")))) == ["<b.py>", "<a.py>"]


def test_globs(tree: Path) -> None:
    assert texts(Corpus(spec("src/*.py"))) == ["<a.py>", "<b.py>"]
    assert texts(Corpus(spec("src/**/*.py", exclude=("tests", "__pycache__")))) == ["<a.py>", "<b.py>", "<sub/c.py>"]


def test_a_path_with_magic_characters_is_a_path_first(tree: Path) -> None:
    (tree / "x[1].txt").write_text("bracket")
    assert texts(Corpus(spec("x[1].txt"))) == ["bracket"]


def test_every_nth_document_is_held_out(tree: Path) -> None:
    corpus = Corpus(spec("src", held_out_every=3))  # a b empty | c d z
    assert corpus.has_eval
    assert texts(corpus, "eval") == ["<a.py>", "<sub/c.py>"]
    assert texts(corpus) == ["<b.py>", "<sub/tests/d.py>", "<z.md>"]


def test_records_are_held_out_one_by_one(tree: Path) -> None:
    lines = [json.dumps({"text": f"r{number}"}) for number in range(5)]
    (tree / "x.jsonl").write_text("\n".join(lines))
    corpus = Corpus(spec("x.jsonl", "src/a.py", held_out_every=2))
    assert texts(corpus, "eval") == ["r0", "r2", "r4"]
    assert texts(corpus) == ["r1", "r3", "<a.py>"]


def test_the_two_sides_are_disjoint_and_complete(tree: Path) -> None:
    everything = texts(Corpus(spec("src")))
    for every in range(2, 8):
        corpus = Corpus(spec("src", held_out_every=every))
        train, held_out = texts(corpus), texts(corpus, "eval")
        assert not set(train) & set(held_out)
        assert sorted(train + held_out) == sorted(everything)


def test_eval_files_are_never_trained_on(tree: Path) -> None:
    corpus = Corpus(spec("src", eval=("src/sub", "src/b.py")))
    assert texts(corpus, "eval") == ["<sub/c.py>", "<sub/tests/d.py>", "<b.py>"]
    assert texts(corpus) == ["<a.py>", "<z.md>"]
    assert "no training data" in refused(spec("src/a.py", eval=("src/a.py",)))[0]


def test_without_evaluation(tree: Path) -> None:
    corpus = Corpus(spec("src"))
    assert not corpus.has_eval
    assert texts(corpus, "eval") == []


def test_the_standard_library() -> None:
    corpus = Corpus(spec("python-stdlib", exclude=("test", "tests"), held_out_every=20))
    stdlib = Path(sysconfig.get_path("stdlib")).resolve()
    names = {file.path.relative_to(stdlib).as_posix() for file in corpus.train_files}
    assert {"ast.py", "json/decoder.py"} <= names
    assert all(name.endswith(".py") for name in names)
    assert not any(part in name.split("/") for name in names for part in ("test", "site-packages", "__pycache__"))
    document = next(corpus.eval_documents())
    assert document.source.endswith(".py")
    assert document.data == Path(document.source).read_bytes()


def test_all_missing_paths_are_reported_at_once(tree: Path) -> None:
    problems = refused(spec("none.txt", "src/*.rs", "src/a.py", "src", eval=("gone",), file_pattern="*.c"))
    assert len(problems) == 4
    assert "data.eval: 'gone' does not exist" in problems[0]
    assert "data.train: 'none.txt' does not exist" in problems[1]
    assert "data.train: the pattern 'src/*.rs' matches no file" in problems[2]
    assert "data.train: src: no file in it matches '*.c'" in problems[3]


def test_exclude_is_named_if_nothing_is_left(tree: Path) -> None:
    assert "once exclude (sub, *.py) is applied" in refused(spec("src/*.py", exclude=("sub", "*.py")))[0]


def test_formats_follow_names_unless_one_is_given(tree: Path) -> None:
    (tree / "x.txt").write_text('{"text": "inside"}\n')
    assert texts(Corpus(spec("x.txt"))) == ['{"text": "inside"}\n']
    assert texts(Corpus(spec("x.txt", format="jsonl"))) == ["inside"]
    (tree / "src" / "y.jsonl").write_text('{"text": "in a folder"}\n')
    assert texts(Corpus(spec("src", format="jsonl"))) == ["in a folder"]


def test_saved_datasets(tree: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict({"text": ["one", "", "two", "three"], "n": [1, 2, 3, 4]})
    rows.save_to_disk(str(tree / "rows"))
    DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tree / "splits"))
    assert texts(Corpus(spec("rows"))) == ["one", "two", "three"]
    corpus = Corpus(spec("splits/train", format="dataset", held_out_every=2))
    assert (texts(corpus, "eval"), texts(corpus)) == (["one", "two"], ["three"])
    assert "has several splits; select one of test, train" in refused(spec("splits"))[0]
    assert "was not written by save_to_disk of datasets" in refused(spec("src", format="dataset"))[0]
    assert "is a file; give the directory of a saved dataset" in refused(spec("src/a.py", format="dataset"))[0]
