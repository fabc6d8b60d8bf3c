"""What is pushed, when, and in which order; a push blocks nothing and loses nothing."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_weights

from ds_trainer import TrainerCallback
from ds_trainer.training.hub import uploads
from ds_trainer.training.hub.client import HubError
from ds_trainer.utils.errors import ConfigError
from tests.support.hub_server import TOKEN, HubServer, pointed_at
from tests.support.pool import pool
from tests.training.hub.support import NAME, AtStep, make_trainer, run, wait_for

MODEL = {"README.md", "model.safetensors", "training_args.json", "ds_config.json"}
CHECKPOINT = {"manifest.json", "trainer_state.json", "scheduler.pt", "random_state_rank0.pt"} | {
    "rank_00000.safetensors",
    "progress.pt",
}
IN_PROGRESS = ["Training in progress, step 2", "Training in progress, step 4"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_each_hub_strategy_pushes_its_files(hub: HubServer, tmp_path: Path, strategy: str, background: bool) -> None:
    run(tmp_path, hub_strategy=strategy, hub_always_push=True, save_async=background)
    folders = {"checkpoint": ["last-checkpoint"] * 2, "all_checkpoints": ["checkpoint-2", "checkpoint-4"]}
    expected: list[str] = []
    for index, message in enumerate(IN_PROGRESS if strategy != "end" else []):
        expected.append(message)
        if strategy in folders:
            expected.append(f"{message}, checkpoint")
            commit = hub.commits[len(expected) - 1]
            folder = folders[strategy][index]
            assert {path.partition("/")[0] for path in commit.added} == {folder}
            names = {path.partition("/")[2] for path in commit.added}
            assert "manifest.json" in names
            assert json.loads(commit.added[f"{folder}/manifest.json"])["step"] == 2 * index + 2
    assert hub.messages() == [*expected, "End of training"]
    files = hub.files(NAME)
    assert MODEL | {"trainer_state.json"} <= set(files)
    assert "latest" not in files
    nested = {path for path in files if "/" in path}
    if strategy not in folders:
        assert not nested
    else:  # the model beside the optimizer's shards
        for folder in set(folders[strategy]):
            assert {f"{folder}/{name}" for name in CHECKPOINT} <= nested
    local = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert files["model.safetensors"] == local
    assert not list((tmp_path / "run").glob(f".{uploads.FOLDER}*"))


def test_commits_of_epoch_saves_name_the_epoch(hub: HubServer, tmp_path: Path) -> None:
    run(tmp_path, save_strategy="epoch", max_steps=-1, num_train_epochs=1)
    assert hub.messages() == ["Training in progress, epoch 1", "End of training"]


def test_training_continues_during_a_push(hub: HubServer, tmp_path: Path) -> None:
    arrived, release = hub.hold("/commit/")
    seen: dict[str, Any] = {}

    def check() -> None:
        assert arrived.wait(30)
        seen["commits"] = hub.messages()

    def release_and_wait() -> None:
        seen["later"] = hub.messages()
        release.set()
        wait_for(lambda: not trainer._ds_trainer.publisher.uploads.busy)

    steps = AtStep(step3=check, step7=release_and_wait)
    trainer = make_trainer(tmp_path, callbacks=[steps], max_steps=8)
    trainer.train()
    trainer.engine.close()
    assert steps.reached == list(range(1, 9))
    assert seen == {"commits": [], "later": []}  # four more steps were done while the push of step 2 was held
    # Saves 4 and 6 were passed over: at most one push is under way.
    assert hub.messages() == ["Training in progress, step 2", "Training in progress, step 8", "End of training"]
    assert [json.loads(commit.added["training_args.json"]) for commit in hub.commits[:1]]


def test_every_save_is_pushed_if_requested(hub: HubServer, tmp_path: Path) -> None:
    arrived, release = hub.hold("/commit/")
    weights: dict[int, bytes] = {}

    class Keep(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights[state.global_step] = (tmp_path / "run" / "model.safetensors").read_bytes()

    steps = AtStep(step7=lambda: (arrived.wait(30), release.set()))
    run(tmp_path, callbacks=[steps, Keep()], max_steps=8, hub_always_push=True)
    saved = [2, 4, 6, 8]
    assert hub.messages() == [*(f"Training in progress, step {step}" for step in saved), "End of training"]
    assert len(set(weights.values())) == 4
    for step, commit in zip(saved, hub.commits, strict=False):  # what was there when it was saved, not what came later
        assert commit.added["model.safetensors"] == weights[step]


@pytest.mark.cases(1)
@pytest.mark.parametrize("set_aside", [True, False])
def test_a_checkpoint_removed_during_its_push_arrives_complete(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_aside: bool
) -> None:
    """``save_total_limit=1`` beside a slow push. Control: without setting files aside, it cannot work."""
    if not set_aside:
        from ds_trainer.training.hub import publisher as hooks

        monkeypatch.setattr(hooks, "stage_checkpoint", lambda checkpoint, target: checkpoint)
    arrived, release = hub.hold("PUT /storage/")
    folder = tmp_path / "run"
    remaining: list[str] = []

    def check() -> None:
        assert arrived.wait(30)
        remaining.extend(sorted(path.name for path in folder.glob("checkpoint-*")))
        release.set()

    run(
        tmp_path,
        callbacks=[AtStep(step7=check)],
        max_steps=8,
        hub_always_push=True,
        hub_strategy="all_checkpoints",
        save_total_limit=1,
    )
    assert remaining == ["checkpoint-6"]
    arrived_steps = {path.split("/")[0] for path in hub.files(NAME) if path.startswith("checkpoint-")}
    if not set_aside:
        assert "checkpoint-2" not in arrived_steps
        return
    assert arrived_steps == {f"checkpoint-{step}" for step in (2, 4, 6, 8)}
    for step in (2, 4, 6, 8):
        progress = torch.load(io.BytesIO(hub.files(NAME)[f"checkpoint-{step}/progress.pt"]), weights_only=True)
        assert progress["counters"]["global_steps"] == step
        assert json.loads(hub.files(NAME)[f"checkpoint-{step}/trainer_state.json"])["global_step"] == step


def test_a_run_resumes_from_the_last_checkpoint_on_the_hub(hub: HubServer, tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", max_steps=6, push_to_hub=False)
    stop = AtStep(step4=lambda: setattr(trainer.control, "should_training_stop", True))
    trainer = make_trainer(tmp_path / "first", callbacks=[stop], max_steps=6, hub_strategy="checkpoint")
    trainer.train()
    trainer.engine.close()
    assert trainer.state.global_step == 4
    copy = tmp_path / "downloaded"
    for path, data in hub.files(NAME).items():
        if path.startswith("last-checkpoint/"):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            (copy / path).write_bytes(data)
    hub.repositories[NAME].branches["main"]["last-checkpoint/random_state_rank7.pt"] = b"of an earlier, larger run"
    resumed = make_trainer(tmp_path / "second", max_steps=6, hub_strategy="checkpoint")
    resumed.train(resume_from_checkpoint=str(copy / "last-checkpoint"))
    resumed.engine.close()
    pushed = load_weights(hub.files(NAME)["model.safetensors"])
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, pushed[name])
    assert "last-checkpoint/random_state_rank7.pt" not in hub.files(NAME)
    assert json.loads(hub.files(NAME)["last-checkpoint/manifest.json"])["step"] == 6


def test_the_newest_checkpoint_is_on_the_hub_at_the_end(hub: HubServer, tmp_path: Path) -> None:
    _, release = hub.hold("/commit/")
    steps = AtStep(step6=lambda: None)
    trainer = make_trainer(tmp_path, callbacks=[steps], max_steps=6, hub_strategy="checkpoint")
    trainer.add_callback(_OnTrainEnd(release.set))
    trainer.train()
    trainer.engine.close()
    assert hub.messages() == [
        "Training in progress, step 2",
        "Training in progress, step 2, checkpoint",
        "End of training",
        "End of training, checkpoint",
    ]
    assert json.loads(hub.files(NAME)["last-checkpoint/manifest.json"])["step"] == 6


class _OnTrainEnd(TrainerCallback):
    def __init__(self, function: Any) -> None:
        self.function = function

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.function()


def test_push_to_hub_can_be_called_before_training(hub: HubServer, tmp_path: Path) -> None:
    pushed_steps: list[int] = []

    class PushCallback(TrainerCallback):
        def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pushed_steps.append(state.global_step)

    trainer = make_trainer(tmp_path, push_to_hub=False, callbacks=[PushCallback()])
    assert hub.requests == [] and trainer.hub_model_id is None
    info = trainer.push_to_hub()
    assert trainer.hub_model_id == NAME and pushed_steps == [0]
    assert info.commit_url.startswith(f"{hub.url}/{NAME}/commit/")
    branch = hub.repositories[NAME].branches["main"]
    branch["model-00001-of-00002.safetensors"] = branch["pytorch_model.bin.index.json"] = b"of an earlier model"
    beside = ("model_ema.safetensors", "model.fp16.safetensors", "model-best.safetensors", "pytorch_model_ema.bin")
    others = {name: b"of a person" for name in ("handler.py", "data/model.csv", "logo.png", *beside)}
    branch.update(others)
    _, release = hub.hold("/commit/")
    future = trainer.push_to_hub("Once more", blocking=False, license="mit")
    assert isinstance(future, Future) and not future.done()
    release.set()
    assert future.result(30).commit_message == "Once more"
    assert hub.messages() == ["End of training", "Once more"]
    assert set(hub.files(NAME)) == {"README.md", "model.safetensors", "training_args.json", *others}
    assert b"license: mit" in hub.files(NAME)["README.md"]
    trainer.push_to_hub("Words of before hold", revision="other")
    assert b"license: mit" in hub.files(NAME, "other")["README.md"]


def test_save_model_called_by_the_user_is_pushed_but_not_internal_saves(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.save_model(str(tmp_path / "elsewhere"), _internal_call=True)
    assert hub.messages() == []
    trainer.save_model()
    assert hub.messages() == ["Model save"]


def test_a_subclass_that_overrides_save_model_pushes_once(hub: HubServer, tmp_path: Path) -> None:
    class Older(type(make_trainer(tmp_path, push_to_hub=False))):  # type: ignore[misc]
        def save_model(self, output_dir: str | None = None) -> None:
            super().save_model(output_dir)

    trainer = make_trainer(tmp_path)
    trainer.__class__ = Older
    trainer.save_model()
    assert hub.messages() == ["Model save"]


def test_a_push_that_fails_does_not_end_the_training(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused: list[str] = []

    def refuse() -> None:
        wait_for(lambda: len(hub.commits) == 1 and not trainer._ds_trainer.publisher.uploads.busy)
        hub.tokens[TOKEN] = False

    def accept() -> None:
        wait_for(lambda: not trainer._ds_trainer.publisher.uploads.busy)
        refused.extend(hub.messages())
        hub.tokens[TOKEN] = True

    trainer = make_trainer(tmp_path, callbacks=[AtStep(step3=refuse, step5=accept)], max_steps=6)
    import logging

    logging.getLogger("ds_trainer").propagate = True  # to where caplog listens
    trainer.train()
    trainer.engine.close()
    assert refused == ["Training in progress, step 2"]
    # One record may reach two loggers.
    records = {id(record): record for record in caplog.records}.values()
    warnings = [record.getMessage() for record in records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "403" in warnings[0] and "write permission" in warnings[0]
    assert "Training in progress, step 4" in warnings[0] and TOKEN not in warnings[0]
    assert hub.messages()[1:] in (["Training in progress, step 6", "End of training"], ["End of training"])
    assert (tmp_path / "run" / "checkpoint-4").is_dir()
    hub.tokens[TOKEN] = False
    with pytest.raises(ConfigError, match="403"):
        trainer.push_to_hub()


@pytest.mark.cases(2)
@pytest.mark.parametrize("status", [500, 503, 429])
def test_temporary_errors_are_retried(hub: HubServer, tmp_path: Path, status: int) -> None:
    """huggingface_hub itself does not retry the creation of the repository, the branch and the commit."""
    for path in ("/api/repos/create", "/branch/", "/commit/"):
        hub.fail(path, status, times=2)
    trainer = make_trainer(tmp_path, hub_revision="v1")
    trainer.push_to_hub()
    assert hub.messages("v1") == ["End of training"]
    assert sum("/commit/" in request for request in hub.requests) == 3


def test_permanent_errors_end_the_retries(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    hub.fail("/commit/", 502, times=99)
    with pytest.raises(HubError, match="502"):
        trainer.push_to_hub()
    assert sum("/commit/" in request for request in hub.requests) == 3
    assert not list((tmp_path / "run").glob(f".{uploads.FOLDER}*"))


def test_a_process_waits_for_its_push_before_it_exits(hub: HubServer, tmp_path: Path) -> None:
    """A script whose last line begins a push."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights.bin").write_bytes(os.urandom(5000))
    script = (
        "import sys; from pathlib import Path\n"
        "from ds_trainer.training.hub.client import Repository\n"
        "from ds_trainer.training.hub.uploads import Commit, Uploads, stage_model\n"
        "out = Path(sys.argv[1]); uploads = Uploads(out)\n"
        "prepare = lambda staged: [Commit(stage_model(out, staged / 'm'), 'last words')]\n"
        "uploads.begin(prepare, Repository('run'), None)\n"
        "assert uploads.busy\n"
    )
    arrived, release = hub.hold("/commit/")
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "out")], env={**os.environ, **variables})
    assert arrived.wait(60) and process.poll() is None
    release.set()
    assert process.wait(30) == 0
    assert hub.messages() == ["last words"] and set(hub.files(NAME)) == {"weights.bin"}


def test_files_that_are_never_modified_in_place_are_linked(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "checkpoint-3").mkdir(parents=True)
    (source / "_private").mkdir()
    for name in ("model.safetensors", "config.json", "checkpoint-3/state.pt", ".hidden", "_private/x"):
        (source / name).write_text(name)
    (source / "latest").symlink_to(source)
    uploads.stage_model(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert os.path.samefile(target / "model.safetensors", source / "model.safetensors")
    assert not os.path.samefile(target / "config.json", source / "config.json")
    staged = uploads.stage_checkpoint(source / "checkpoint-3", tmp_path / "whole")
    assert os.path.samefile(staged / "state.pt", source / "checkpoint-3" / "state.pt")


def push_here(url: str, folder: str, step: int) -> None:
    """Push from an output directory, without a training, weights that this process has trained elsewhere."""
    with pointed_at(url):
        trainer = make_trainer(Path(folder, "other"), max_steps=step, push_to_hub=False)
        trainer.train()
        for name in ("push_to_hub", "output_dir"):
            setattr(trainer.args, name, {"push_to_hub": True, "output_dir": str(Path(folder, "run"))}[name])
        trainer.push_to_hub("from another process")
        trainer.engine.close()


@pytest.mark.parametrize("held", ["/preupload/", "PUT /storage/", "/commit/"])
def test_two_processes_push_from_one_directory(hub: HubServer, tmp_path: Path, held: str) -> None:
    """The second begins and ends while the first is under way: neither takes the other's files away."""
    pool(1).run(os.getpid)  # started before anything waits for it
    arrived, release = hub.hold(held)
    run(tmp_path, push_to_hub=False)
    first = make_trainer(tmp_path, hub_strategy="end", save_strategy="no")
    push = first.push_to_hub("the first", blocking=False)
    assert arrived.wait(60)
    pool(1).run(push_here, hub.url, str(tmp_path), 1)
    assert hub.messages() == ["from another process"]
    release.set()
    push.result(60)
    assert hub.messages() == ["from another process", "the first"]
    assert set(hub.files(NAME)) >= MODEL
    for commit in hub.commits:
        assert not commit.deleted
        load_weights(commit.added["model.safetensors"])
    assert not list((tmp_path / "run").glob(f".{uploads.FOLDER}*"))


@pytest.mark.parametrize(("owner", "left"), [("dead", False), ("alive", True), ("elsewhere", True)])
def test_files_staged_by_a_killed_process_are_removed(owner: str, left: bool, tmp_path: Path) -> None:
    """But not those of one that lives, or may."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = "another" if owner == "elsewhere" else socket.gethostname()
    process = os.getppid() if owner == "alive" else ended.pid
    leftover = tmp_path / f".{uploads.FOLDER}.{host}.{process}.0123abcd.partial" / "model"
    leftover.mkdir(parents=True)

    class Failing:
        def use_branch(self, revision: str | None) -> None:
            raise HubError("no connection")

    push = uploads.Uploads(tmp_path).begin(lambda staged: [], Failing(), None)  # type: ignore[arg-type]
    assert isinstance(push.exception(60), HubError)
    assert leftover.exists() is left and len(list(tmp_path.iterdir())) == left
