"""Tokens and keys are nowhere: not on the disk, not in logs at level debug, not in errors, not on the Hub."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import TrainingArguments
from ds_trainer.config.user_config import read_user_config
from ds_trainer.monitor.report.writing import write_report
from ds_trainer.utils.errors import ConfigError
from tests.support.hub_server import HubServer, pointed_at
from tests.support.pool import pool
from tests.training.hub.support import NAME, make_trainer, wait_for
from tests.utils.test_secret_table import TEXTS

IN_ARGUMENTS = "hf_inTheArguments0123456789abcd"
IN_ENVIRONMENT = "hf_inTheEnvironment0123456789ab"
BY_HAND = "notEvenLikeATokenOfTheHub42"
OF_COMET = "cometKeyInTheDeepSpeedFile0815"
IN_RUN_NAME = "passwordInTheAddress77"
ON_COMMAND_LINE = "valueOfAnOption5150"
OF_ANOTHER_VARIABLE = "valueOfAVariable1984"
SECRETS = (IN_ARGUMENTS, IN_ENVIRONMENT, BY_HAND, OF_COMET, IN_RUN_NAME, ON_COMMAND_LINE, OF_ANOTHER_VARIABLE)
ALL_WAYS = "\n\n".join(text for text, _ in TEXTS)
_CLIENTS = ("huggingface_hub", "httpx", "httpcore", "httpx2", "httpcore2")  # before and since huggingface_hub 2


def found_in(text: bytes) -> list[str]:
    return [secret for secret in {*SECRETS, *(secret for _, secret in TEXTS)} if secret.encode() in text]


@contextmanager
def all_text(path: Path) -> Iterator[None]:
    """What this process writes to its streams, and every log record of every level, goes to ``path``."""
    from huggingface_hub import constants

    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    handler = logging.StreamHandler(path.open("a"))
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    level, talkative = root.level, [logging.getLogger(name) for name in _CLIENTS]
    with path.open("ab") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        for logger in talkative:
            logger.setLevel(logging.DEBUG)
        before, constants.HF_DEBUG = constants.HF_DEBUG, True
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            constants.HF_DEBUG = before
            root.removeHandler(handler)
            root.setLevel(level)
            for logger in talkative:
                logger.setLevel(logging.NOTSET)
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)


def run_on_rank(url: str, folder: str, log_file: str) -> dict[str, Any]:
    """Pushes that succeed and fail; returns messages of errors, and what DeepSpeed and the writer of arguments got."""
    from ds_trainer.training.hub import client

    client.WAITS, before = (0.01,), client.WAITS
    os.environ["HF_TOKEN"] = IN_ENVIRONMENT
    os.environ["ANOTHER_API_KEY"] = OF_ANOTHER_VARIABLE
    before_argv, sys.orig_argv = sys.orig_argv, [*sys.orig_argv, "--wandb-key", ON_COMMAND_LINE]
    errors = []
    rank = int(os.environ["RANK"])
    try:
        with pointed_at(url), all_text(Path(log_file).with_suffix(f".{rank}")):
            trainer = make_trainer(
                Path(folder),
                hub_token=IN_ARGUMENTS,
                run_name=f"https://me:{IN_RUN_NAME}@host/{OF_ANOTHER_VARIABLE} of {ON_COMMAND_LINE}\n\n{ALL_WAYS}",
                hub_strategy="all_checkpoints",
                hub_always_push=True,
                per_device_train_batch_size=1,
                deepspeed={"comet": {"enabled": False, "api_key": OF_COMET, "project": "visible"}, **_STAGE},
                log_level="debug",
                logging_steps=1,
                report_to=["tensorboard"],
            )
            trainer.train()
            write_report(Path(trainer.args.output_dir))
            for token in (BY_HAND, IN_ENVIRONMENT):
                try:
                    trainer.push_to_hub(token=token)
                except ConfigError:
                    errors.append(traceback.format_exc())
            print(repr(trainer.args), trainer.args.to_json_string(), trainer.args.to_sanitized_dict())
            compiled = trainer._ds_trainer.compiled
            print(compiled.to_json(), compiled.explain(), compiled.describe("comet.api_key"))
            torch.save(trainer.args.to_dict(), Path(folder) / "run" / f"arguments{rank}.pt")
            given = compiled.to_dict()["comet"]["api_key"]
            trainer.engine.close()
    finally:
        client.WAITS = before
        del os.environ["HF_TOKEN"], os.environ["ANOTHER_API_KEY"]
        sys.orig_argv = before_argv
    return {"errors": errors, "given": given}


_STAGE = {"zero_optimization": {"stage": 1}}


def test_no_secret_is_written_anywhere(hub: HubServer, tmp_path: Path) -> None:
    hub.tokens = {IN_ARGUMENTS: True}
    hub.fail("/commit/", 500)  # tried again
    hub.fail("/commit/", 401)  # so that the first push fails
    log_file = tmp_path / "said.log"
    results = pool(2).run(run_on_rank, hub.url, str(tmp_path), str(log_file))
    assert [result["given"] for result in results] == [OF_COMET, OF_COMET]  # DeepSpeed gets the real one
    assert all(len(result["errors"]) == 2 and "401" in result["errors"][0] for result in results)
    assert "Training in progress, step 4" in hub.messages() and "End of training" in hub.messages()

    logs = b"".join(path.read_bytes() for path in tmp_path.glob("said*"))
    for text in (b"huggingface_hub", b"httpcore", b"Send: curl", b"401", b"step 4/4", b'"project": "visible"'):
        assert text in logs, text  # the logs are there, or the search would find nothing
    assert found_in(logs) == []
    assert found_in(json.dumps([result["errors"] for result in results]).encode()) == []

    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"ds_config.json", "training_args.json", "arguments1.pt", "report.html", "report.json"} <= {
        path.name for path in written
    }
    assert any(path.name == "rank_00001.safetensors" for path in written) and any(
        "tfevents" in path.name for path in written
    )
    assert {path.name: found_in(path.read_bytes()) for path in written if found_in(path.read_bytes())} == {}
    assert b'"<API_KEY>"' in (tmp_path / "run" / "ds_config.json").read_bytes()

    uploaded = hub.files(NAME)
    assert any(path == "checkpoint-4/progress.pt" for path in uploaded)
    assert [found for data in hub.everything() if (found := found_in(data))] == []


def test_control_the_search_finds_secrets(tmp_path: Path) -> None:
    """Control: a checkpoint and a log that do hold secrets."""
    torch.save({"ds_config": {"comet": {"api_key": OF_COMET}}}, tmp_path / "states.pt")
    assert found_in((tmp_path / "states.pt").read_bytes()) == [OF_COMET]
    with all_text(tmp_path / "said"):
        os.write(1, f"on standard output: {IN_ARGUMENTS}".encode())
        os.write(2, f"on standard error: {BY_HAND}".encode())
        logging.getLogger("somebody").debug("in a log: %s", IN_ENVIRONMENT)
    assert set(found_in((tmp_path / "said").read_bytes())) == {IN_ARGUMENTS, IN_ENVIRONMENT, BY_HAND}


@pytest.mark.parametrize(
    "source",
    [
        {"comet": {"api_key": b"%s" % OF_COMET.encode()}},
        [{"comet": {"api_key": OF_COMET}}],
        f'[{{"api_key": "{OF_COMET}"}}]',
        f"{{comet: {{api_key: {OF_COMET}, project: x}}}}",
        f'{{"comet": {{"api_key": "{OF_COMET}", "api_key": 3}}',
    ],
    ids=["bytes", "list", "text of a list", "unquoted", "no end"],
)
def test_rejecting_a_file_shows_no_secret(source: Any, tmp_path: Path) -> None:
    output = ""
    try:
        found, problems = read_user_config(source)
        output = str(problems)
        args = TrainingArguments(str(tmp_path), deepspeed=found.plain(), use_cpu=True)
        output += str(args)
    except ConfigError as error:
        output += "".join(traceback.format_exception(error))
    assert output and OF_COMET not in output


def test_a_secret_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"comet.api_key=<API_KEY> must be") as caught:
        make_trainer(tmp_path, push_to_hub=False, deepspeed={"comet": {"api_key": 81540815}})
    assert "81540815" not in str(caught.value)


def test_the_config_command_shows_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ds_trainer.cli.main import main

    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"comet": {"enabled": False, "api_key": OF_COMET}}))
    for options in ([], ["--explain"]):
        assert main(["config", "--deepspeed", str(file), "--use_cpu", "true", *options]) == 0
        out = capsys.readouterr().out
        assert "<API_KEY>" in out and OF_COMET not in out


def test_arguments_given_as_text_show_no_secret(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), deepspeed=f'{{"comet": {{"api_key": "{OF_COMET}"}}}}', hub_token=BY_HAND)
    for shown in (repr(args), args.to_json_string(), str(args.to_sanitized_dict())):
        assert OF_COMET not in shown and BY_HAND not in shown and "comet" in shown


def test_a_failed_background_push_shows_no_secret(hub: HubServer, tmp_path: Path) -> None:
    """A future's error, with all that it came from."""
    trainer = make_trainer(tmp_path)
    hub.tokens.clear()
    future = trainer.push_to_hub(blocking=False)
    wait_for(future.done)
    error = future.exception()
    assert isinstance(error, ConfigError) and "401" in str(error)
    assert "hf_" not in "".join(traceback.format_exception(error))
