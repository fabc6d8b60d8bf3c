"""Files that are none of text, or of another kind, for every path of every subcommand: one error, and no output."""

from __future__ import annotations

import ctypes
import gzip
import io
import json
import os
import resource
import signal
import socket
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.cli.main import main
from tests.support.chat_model import save_chat_model
from tests.support.forks import in_a_fork
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

SAMPLE = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
RECIPE: dict[str, Any] = {
    "model": {"path": "tiny"},
    "task": {"name": "sft"},
    "data": {"train": "good.jsonl", "max_length": 64},
    "arguments": {"output_dir": "out", "max_steps": 1, "use_cpu": True},
}
CONTENTS = {
    "empty": b"", "blank": b"  \n\n\t\n", "nul": b"\0" * 5000, "utf16": SAMPLE.encode("utf-16"),
    "utf32": SAMPLE.encode("utf-32"), "latin1": '{"text": "café"}\n'.encode("latin-1"), "mark": b"\xef\xbb\xbf",
    "noise": bytes(range(256)) * 400, "gz": gzip.compress(SAMPLE.encode() * 100),
    "gz_cut": gzip.compress(os.urandom(5000))[:2000], "zst": b"\x28\xb5\x2f\xfd" + os.urandom(500),
    "parquet": b"PAR1" + os.urandom(500) + b"PAR1", "zip": b"PK\x03\x04" + os.urandom(500),
    "pickle": b"\x80\x04\x95" + b"a" * 100, "deep_objects": b'{"a":' * 100_000, "deep_lists": b"[" * 100_000,
    "digits": b'{"a": ' + b"9" * 5000 + b"}", "nan": b'{"messages": NaN, "b": Infinity}',
    "twice": b'{"a": 1, "a": 2, "messages": 1}', "null": b"null", "number": b"5", "text": b'"x"',
    "page": b"<!DOCTYPE html><html><body>404: [</body></html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:aaaa\nsize 12345\n",
    "conflict": b"<<<<<<< HEAD\na: 1\n=======\na: 2\n>>>>>>> x\n",
    "tag": b"a: !!python/object/apply:os.system ['touch pwned']\n",
    "bomb": b"a0: &a0 [l,l,l,l,l]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 12)),
    "itself": b"a: &a [*a]\n", "tabs": b"a:\n\tb: 1\n\t- c\n", "documents": b"a: 1\n---\nb: 2\n",
    "unclosed": b'{"a": "', "escapes": b'{"\\u001b[2J\\u202e": 1, "messages": 2}', "line": b"x" * 17_000_000,
    "keys": b"{" + b",".join(b'"k%d": %d' % (i, i) for i in range(20_000)) + b"}",
}  # fmt: skip
PATHS = [
    "/dev/zero", "/dev/full", "/proc/kmsg", "x" * 5000, "a/" * 3000, "~nosuchuser/x", "/", "..", "", " ", "a\nb",
]  # fmt: skip
COMMANDS: dict[str, list[str]] = {
    "train a recipe": ["train", "@.yaml"],
    "show the data of a recipe": ["data", "show", "@.yaml"],
    "plan a recipe": ["plan", "@.yaml"],
    "plan a configuration": ["plan", "@.json"],
    "plan for a device": ["plan", "tiny", "--device-file", "@.yaml"],
    "report": ["report", "@.json"],
    "plot": ["plot", "@.jsonl"],
    "inspect": ["checkpoint", "inspect", "@.json"],
    "export": ["checkpoint", "export", "@.json", "--to", "exported"],
    "chat": ["chat", "@.json"],
    "launch by a hostfile": ["launch", "--dry-run", "--hostfile", "@.txt", "s.py"],
    "begin with data": ["init", "new.yaml", "--model", "tiny", "--yes", "--data", "@.jsonl"],
    "begin with a model": ["init", "new.yaml", "--data", "good.jsonl", "--yes", "--model", "@.json"],
    "data.train": ["data", "show", "r.yaml", "@.jsonl"],
    "data.eval": ["train", "r.yaml", "@.jsonl"],
    "data.chat_template": ["data", "show", "r.yaml", "@.jinja"],
    "model.path": ["data", "show", "r.yaml", "@.json"],
    "arguments.output_dir": ["train", "r.yaml", "@.json"],
}


def _late(*_: object) -> None:
    raise TimeoutError("it waits")


def mistakes_of(folder: str, name: str) -> list[str]:
    """What is wrong with how the command ``name`` answers to each file; runs in a process of its own."""
    os.chdir(folder)
    words = list(COMMANDS[name])
    suffix = next(word for word in words if word.startswith("@"))[1:]
    os.mkfifo(f"fifo{suffix}")
    Path(f"folder{suffix}").mkdir()
    Path(f"loop{suffix}").symlink_to(f"loop{suffix}")
    Path(f"lost{suffix}").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"socket{suffix}")
    for kind, content in CONTENTS.items():
        Path(kind + suffix).write_bytes(content)
    with open(f"sparse{suffix}", "wb") as stream:
        stream.truncate(60 << 30)
    kinds = ["fifo", "folder", "loop", "lost", "socket", "sparse", *CONTENTS]
    for late in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(late, _late)
    mistakes = []
    before = set(os.listdir())
    for path in [*(kind + suffix for kind in kinds), *PATHS]:
        given = [path if word.startswith("@") else word for word in words]
        if "." in name:
            section, key = name.split(".")
            Path("r.yaml").write_text(json.dumps({**RECIPE, section: {**RECIPE[section], key: path}}))
            before.add("r.yaml")
            given = given[:-1]
        out, err = io.StringIO(), io.StringIO()
        began, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.alarm(200)  # it waits; on a busy machine work takes long, too
        signal.setitimer(signal.ITIMER_PROF, 30)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code: object = main(given)
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        said = err.getvalue()
        wrong = [
            "does not end with 2" * (code != 2),
            "a traceback" * ("Traceback" in said),
            "no error" * (not (said + out.getvalue()).strip()),
            f"{len(said):,} characters" * (len(said) > 6000),
            "controls the terminal" * ("\x1b" in said + out.getvalue()),
            "slow" * (time.process_time() - began > 5),
            "large" * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held > 500 << 10),
            f"leaves {set(os.listdir()) - before}" * bool(set(os.listdir()) - before),
        ]
        if any(wrong):
            mistakes.append(f"{path[:40]}: {', '.join(filter(None, wrong))}; {code}: {said.strip()[-200:]}")
            for file in set(os.listdir()) - before:
                os.system(f"rm -rf {file}")
    return mistakes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_chat_model(tmp_path / "tiny")
    (tmp_path / "good.jsonl").write_text(f"{SAMPLE}\n" * 20)
    (tmp_path / "s.py").write_text("print(1)\n")
    return tmp_path


@pytest.mark.extended
@pytest.mark.cases(2)
@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_no_such_file_is_one_error(name: str, folder: Path) -> None:
    mistakes = in_a_fork(mistakes_of, str(folder), name)
    assert not mistakes, "\n".join(mistakes)


OUTPUTS: dict[str, list[str]] = {
    "init": ["init", "@.yaml", "--model", "tiny", "--data", "good.jsonl", "--yes"],
    "init anew": ["init", "@.yaml", "--model", "tiny", "--data", "good.jsonl", "--yes", "--force"],
    "plan": ["plan", "tiny", "--devices-per-node", "1", "--config", "@.json"],
    "draw": ["plan", "tiny", "--devices-per-node", "1", "--plot", "@.svg"],
    "compare": ["report", "run", "run", "--output", "@.html"],
    "export": ["checkpoint", "export", "run", "--to", "@"],
    "convert": ["checkpoint", "convert", "run/checkpoint-2", "--format", "universal", "--to", "@"],
}
ALLOWED = {("init anew", "file"), ("convert", "folder")}
PLACES = {
    "file": 2, "folder": 2, "link": 2, "dangling": 2, "loop": 2, "fifo": 2, "null": 2, "file@/x": 2, "ro/x": 2, "ro": 2,
    "full/x": 2, "/proc/x": 2, "a\nb": 0, "new": 0,
}  # fmt: skip


def places_of(folder: str, name: str) -> list[str]:
    """What is wrong with how the command ``name`` treats each place that it is told to write to; in a process alone."""
    os.chdir(folder)
    suffix = next(word for word in OUTPUTS[name] if word.startswith("@"))[1:]
    new_mounts = 0x20000  # CLONE_NEWNS: none of these mounts is seen outside
    mounts = ctypes.CDLL(None).unshare(new_mounts) == 0 and not os.system("mount --make-rprivate / 2>/dev/null")
    for path in ("folder" + suffix, "ro", "full"):
        Path(path).mkdir()
    mine = ["file" + suffix, f"folder{suffix}/mine", "outside"]
    for path in mine:
        Path(path).write_text("mine")
    for link, target in (("link", "outside"), ("dangling", "nowhere"), ("loop", "loop" + suffix)):
        Path(link + suffix).symlink_to(target)
    os.mkfifo("fifo" + suffix)
    if mounts:
        os.mknod("null" + suffix, 0o020666, os.makedev(1, 3))
        mounts = not os.system("mount -t tmpfs -o ro x ro && mount -t tmpfs -o size=4k x full")
        os.system("head -c 9000 /dev/zero >full/filler 2>/dev/null")
    signal.signal(signal.SIGALRM, _late)
    mistakes = []
    for place, expected in PLACES.items():
        if place in ("ro", "ro/x", "full/x", "null") and not mounts:
            continue
        target = place if place == "ro" else place.replace("@", suffix) + suffix
        before = {path: path.lstat().st_ino for path in Path().rglob("*")}
        err = io.StringIO()
        signal.alarm(200)
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(err):
                code: object = main([target if word.startswith("@") else word for word in OUTPUTS[name]])
        except BaseException as error:
            code = repr(error)
        signal.alarm(0)
        after = {path: path.lstat().st_ino for path in Path().rglob("*")}
        changed = [path for path in before if after.get(path) != before[path]]
        changed += [Path(path) for path in mine if Path(path).read_text() != "mine"]
        code_expected = 0 if (name, place) in ALLOWED else expected
        wrong = code != code_expected or (changed and name != "init anew") or (code != 0 and after.keys() - before)
        if wrong or (code != 0 and not err.getvalue().strip()):
            mistakes.append(f"{place!r}: {code}, {changed}, {after.keys() - before}: {err.getvalue().strip()[-200:]}")
    return mistakes


def trained(output_dir: str) -> None:
    args = TrainingArguments(output_dir, max_steps=2, save_steps=2, disable_tqdm=True, use_cpu=True)
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(32))
    trainer.train()
    trainer.engine.close()


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_replaces_nothing(name: str, folder: Path) -> None:
    """Each option that names a place to write to: a failure is one error, and leaves nothing behind."""
    pool(1).run(trained, str(folder / "run"))
    mistakes = in_a_fork(places_of, str(folder), name)
    assert not mistakes, "\n".join(mistakes)


def test_all_files_that_a_recipe_names_are_looked_at_before_samples(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    lost = {"deepspeed": "lost.json", "resume_from_checkpoint": "lost/checkpoint-1", "start_from_weights": "gone"}
    arguments = {**RECIPE["arguments"], **lost}
    Path("r.yaml").write_text(
        json.dumps({**RECIPE, "arguments": arguments, "data": {**RECIPE["data"], "train": "no-data.jsonl"}})
    )
    assert main(["train", "r.yaml"]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in (*lost.values(), "no-data.jsonl")), error


NAMED: dict[str, list[str]] = {
    **{key: ["train", "r.yaml"] for key in ("model.path", "data.tokenizer", "data.chat_template", "data.eval")},
    **{
        f"arguments.{key}": ["train", "r.yaml"] for key in ("deepspeed", "resume_from_checkpoint", "start_from_weights")
    },
    "hostfile": ["launch", "--dry-run", "--hostfile", "@", "s.py"],
    "chat": ["chat", "@"],
    "inspect": ["checkpoint", "inspect", "@"],
    "merge": ["checkpoint", "merge", "@", "--to", "merged"],
    "report": ["report", "@"],
    "plot": ["plot", "@"],
    "plan": ["plan", "@"],
}
KINDS = {
    "fifo": "is a named pipe", "node": "is a device", "socket": "is a socket", "closed": "Permission denied",
    "lost": "is a link to 'nowhere', which does not exist", "loop": "Too many levels of symbolic links",
}  # fmt: skip


def kinds_of(folder: str, name: str) -> list[str]:
    """The answers that do not say what is in the place of a file or directory; in a process without root's rights."""
    os.chdir(folder)
    os.mkfifo("fifo")
    Path("lost").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("node").symlink_to("/dev/full")
    Path("closed").mkdir(mode=0)
    ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # so that modes count
    wrong = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for kind, said in KINDS.items():
            section, _, key = name.partition(".")
            if key:
                Path("r.yaml").write_text(json.dumps({**RECIPE, section: {**RECIPE[section], key: kind}}))
            words = [kind if word == "@" else word for word in NAMED[name]]
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as err:
                code = main(words)
            if code != 2 or said not in err.getvalue() or err.getvalue().count("\n") != 1:
                wrong.append(f"{kind}: {code} {err.getvalue()[-300:]}")
    return wrong


@pytest.mark.cases(2, rest="extended")
@pytest.mark.parametrize("name", NAMED)
def test_what_is_in_the_place_of_a_file_or_directory_is_said(folder: Path, name: str) -> None:
    wrong = in_a_fork(kinds_of, str(folder), name)
    assert not wrong, "\n".join(wrong)


def training_on_a_full_disk(folder: str) -> str:
    os.chdir(folder)
    Path("full").mkdir()
    mount = "mount --make-rprivate / 2>/dev/null && mount -t tmpfs -o size=256k x full"
    if ctypes.CDLL(None).unshare(0x20000) or os.system(mount):
        return "no disk"
    arguments = {**RECIPE["arguments"], "output_dir": "full/out", "save_steps": 1}
    Path("r.yaml").write_text(json.dumps({**RECIPE, "arguments": arguments}))
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as err:
        code = main(["train", "r.yaml"])
    return f"{code} {err.getvalue()}"


def test_a_full_disk_is_one_error(folder: Path) -> None:
    said = in_a_fork(training_on_a_full_disk, str(folder))
    if said == "no disk":
        pytest.skip("cannot mount a disk")
    assert said.startswith("1 ") and "No space left" in said and "Traceback" not in said, said


def test_a_comparison_replaces_an_earlier_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool(1).run(trained, str(folder / "run"))
    monkeypatch.chdir(folder)
    assert [main(["report", "run", "run"]) for _ in range(2)] == [0, 0]


def test_the_base_model_is_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the weights of a recipe whose output directory it is; those of an earlier run are."""
    recipe, model = folder / "r.yaml", folder / "tiny"
    before = {path: path.read_bytes() for path in model.iterdir()}
    arguments = {**RECIPE["arguments"], "output_dir": str(model)}
    data = {**RECIPE["data"], "train": str(folder / "good.jsonl")}
    recipe.write_text(json.dumps({**RECIPE, "model": {"path": str(model)}, "data": data, "arguments": arguments}))
    assert main(["train", str(recipe)]) == 2
    assert "has a model that no run of ds_trainer wrote there (config.json, model.safe" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in model.iterdir()} == before
