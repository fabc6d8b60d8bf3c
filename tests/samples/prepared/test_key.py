"""The key: the same content gives the same one anywhere, and whatever decides the samples changes it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.samples.prepared import key as key_module
from ds_trainer.samples.prepared.key import (
    content_key,
    digest_of_code,
    digest_of_files,
    digest_of_tokenizer,
    file_states,
)
from ds_trainer.samples.prepared.prepare import prepare
from ds_trainer.utils.errors import ConfigError
from tests.samples.prepared.conversations import IDENTITY, Encode, parts_of, read_all, write_conversations


def digest(*files: Path) -> str:
    names = [str(file) for file in files]
    return digest_of_files(names, file_states(names), threads=2)


def directory_of(paths: list[Path], out: Path, **options: Any) -> str:
    values = {"identity": IDENTITY, "vocab_size": 1000, "processes": 1, **options}
    return prepare(parts_of(paths), Encode(), out, files=paths, **values).directory.name


def test_names_places_and_times_do_not_count(tmp_path: Path) -> None:
    one = write_conversations(tmp_path / "one", files=2)
    (tmp_path / "two").mkdir()
    other = [Path(shutil.copy(path, tmp_path / "two" / f"renamed-{path.name}")) for path in one]
    os.utime(other[0], (1, 1))
    assert directory_of(one, tmp_path / "out") == directory_of(other, tmp_path / "elsewhere")


def test_content_order_and_borders_of_files_count(tmp_path: Path) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    a.write_bytes(b"12")
    b.write_bytes(b"3")
    c.write_bytes(b"1")
    d, e = tmp_path / "d", tmp_path / "e"
    d.write_bytes(b"23")
    e.write_bytes(b"13")
    digests = [digest(a, b), digest(b, a), digest(c, d), digest(a, e), digest(a), digest(a, b, c)]
    assert len(set(digests)) == len(digests)


def test_large_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "_PART", 1000)
    path = tmp_path / "large"
    found = set()
    for at in (0, 999, 1000, 4500):
        data = bytearray(4501)
        data[at] = 1
        path.write_bytes(data)
        found.add(digest(path))
    assert len(found) == 4


def test_a_change_with_the_same_size_and_mtime_is_seen(tmp_path: Path) -> None:
    paths = write_conversations(tmp_path / "source", files=1)
    before = paths[0].stat()
    first = directory_of(paths, tmp_path / "out")
    text = paths[0].read_text()
    paths[0].write_text(text.replace(" the ", " of  ", 1))
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    after = paths[0].stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert directory_of(paths, tmp_path / "out") != first


def test_sources_that_did_not_change_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    real = key_module._digest_of_part
    monkeypatch.setattr(key_module, "_digest_of_part", lambda part: read.append(part) or real(part))
    paths = write_conversations(tmp_path / "source", files=2)
    names = {directory_of(paths, tmp_path / "out") for _ in range(3)}
    assert len(names) == 1 and len(read) == 2
    paths[0].touch()
    assert directory_of(paths, tmp_path / "out") in names and len(read) == 4


@dataclass(frozen=True)
class Options:
    train_on: str = "all"
    roles: frozenset[str] = frozenset({"a", "b"})


@dataclass(frozen=True)
class OtherOptions(Options):
    pass


def test_identity_and_type_of_tokens_count() -> None:
    values: list[tuple[Any, str]] = [
        ({}, "uint16"),
        ({}, "uint32"),
        ({"options": Options()}, "uint16"),
        ({"options": Options("assistant")}, "uint16"),
        ({"options": OtherOptions()}, "uint16"),
        ({"options": {"train_on": "all"}}, "uint16"),
    ]
    keys = [content_key("s", identity, dtype)[0] for identity, dtype in values]
    assert len(set(keys)) == len(keys)
    assert content_key("s", {"b": 1, "a": 2}, "uint16") == content_key("s", {"a": 2, "b": 1}, "uint16")
    with pytest.raises(ConfigError, match="consists of plain values, but it has a object"):
        content_key("s", {"options": object()}, "uint16")


def test_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_encoding"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rules.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = digest_of_code("some_encoding", packages=["numpy"])
    assert first == digest_of_code("some_encoding", packages=["numpy"]) and set(first) == {"some_encoding", "numpy"}
    (package / "rules.py").write_text("VALUE = 2\n")
    assert digest_of_code("some_encoding")["some_encoding"] != first["some_encoding"]
    assert digest_of_code("some_encoding.rules") != digest_of_code("some_encoding")


def test_a_tokenizer_is_its_files_not_its_place_or_its_last_call(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def made(**more: Any) -> Any:
        vocabulary = {"<pad>": 0, "?": 1, "a": 2, "b": 3}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="?", **more)

    tokenizer = made()
    first = digest_of_tokenizer(tokenizer)
    tokenizer(["a", "a b"], padding="max_length", truncation=True, max_length=7)
    assert digest_of_tokenizer(tokenizer) == first
    for name in ("here", "there"):
        tokenizer.save_pretrained(tmp_path / name)
        assert digest_of_tokenizer(PreTrainedTokenizerFast.from_pretrained(tmp_path / name)) == digest_of_tokenizer(
            PreTrainedTokenizerFast.from_pretrained(tmp_path / "here")
        )
    other = made(eos_token="b")
    templated = made()
    templated.chat_template = "{{ messages }}"
    assert len({first, digest_of_tokenizer(other), digest_of_tokenizer(templated)}) == 3


def test_what_is_there_is_read_from_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """As root, permissions do not count, so the child is another user."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    paths, out = write_conversations(tmp_path / "source", files=1), tmp_path / "out"
    dataset = prepare(parts_of(paths), Encode(), out, files=paths, identity=IDENTITY, vocab_size=1000, processes=1)
    samples, code = read_all(dataset), 1
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(0o755)
    process = os.fork()
    if process == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            assert not os.access(out, os.W_OK)
            values: dict[str, Any] = {"files": paths, "vocab_size": 1000, "processes": 1}
            found = prepare(parts_of(paths), Encode(), out, identity=IDENTITY, **values)
            assert found.report is None and read_all(found) == samples
            with pytest.raises(ConfigError, match=r"cannot be written \(Permission denied\).* Make it writable"):
                prepare(parts_of(paths), Encode(), out, identity={}, **values)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
