"""Ways to write a secret: none is found in anything that a run writes or says. And what only looks like one stays."""

from __future__ import annotations

import base64
import json
import logging
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from ds_trainer import TrainingArguments
from ds_trainer.callbacks.integrations.hyperparameters import hyperparameters
from ds_trainer.monitor.header import header_lines
from ds_trainer.monitor.health.verdict import write_report
from ds_trainer.monitor.metrics_file import MetricsWriter
from ds_trainer.monitor.report.facts import command_line
from ds_trainer.monitor.report.history import HISTORY_NAME, RunHistory
from ds_trainer.utils import outcomes, secrets
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from tests.monitor.test_header import SUMMARY

S = "S3cr3tV4lue99x"
LONG = "A1b2C3d4E5f6G7h8I9j0K1l2M3n4"
AWS = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJzZWNyZXQifQ.dBjftJeZ4CVP-mB92K27uhbUJU1p1r"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7\nS3cr3tBody\n-----END RSA PRIVATE KEY-----"

COMMANDS: list[list[str]] = [
    ["t.py", "--token", S], ["t.py", f"--token={S}"], ["t.py", "--wandb-key", S], ["t.py", f"--private_key={S}"],
    ["t.py", "--db_passwd", S], ["t.py", "--aws_secret_access_key", S], ["t.py", "--wandbApiKey", S],
    ["t.py", f"--HFToken={S}"], ["t.py", "--arguments.hub_token", S], ["t.py", f"--tracker.auth.accessToken={S}"],
    ["t.py", "--secrets.db", S], ["t.py", "-password", S],
    ["ds-trainer", "launch", f"--env=AWS_SECRET_ACCESS_KEY={S}", "r.yaml"],
    ["ds-trainer", "launch", "--env", f"WANDB_API_KEY={S}", "r.yaml"],
    ["ds-trainer", "run", "--set", f"hub_token={S}", "t.py"], ["t.py", "--json", json.dumps({"api_key": S})],
    ["t.py", "--json", json.dumps({"comet": {"apiKey": S, "x": 1}})],
    ["t.py", "--nested", json.dumps({"text": json.dumps({"password": S})})],
    ["t.py", "--deepspeed", f"{{comet: {{api_key: {S}, x: 1}}}}"], ["t.py", "--header", f"Authorization: Bearer {S}"],
    ["t.py", "--header", f"X-Api-Key: {S}"], ["t.py", "--header", f"Cookie: session={S}; theme=dark"],
    ["t.py", "--url", f"https://{S}@github.com/x"], ["t.py", "--url", f"https://user:{S}@host:8/x"],
    ["t.py", "--url", f"postgresql://user:pa@{S}@host/db"], ["t.py", "--url", f"https://host/x?a=b&token={S}"],
    ["t.py", "--hub_token", f"two words {S}"], ["t.py", "--db", f"user:{S}@db.example.org/x"],
    ["curl", "-u", f"me:{S}", "https://host"], ["wandb", "login", S],
    ["t.py", "--next", f"https://host/?next=%2Fx%3Ftoken%3D{S}"],
    ["t.py", "--neptune", base64.b64encode(json.dumps({"api_key": S}).encode()).decode()],
    ["t.py", f"--export=ALL,HF_TOKEN={S},X=1"],
]  # fmt: skip
TEXTS: list[tuple[str, str]] = [
    (f"s3://AKIAIOSFODNN7EXAMPLE:{S}@bucket/x", S), (f"https://hf_{LONG}:{S}@host/x", S),
    (f"SharedAccessSignature={S}", S), (f"auth_token: !!str {S}", S),
    ("hf_" + LONG, LONG), ("sk-proj-" + LONG, LONG), ("sk-ant-api03-" + LONG, LONG), ("ghp_" + LONG, LONG),
    ("github_pat_11A_" + LONG, LONG), ("glpat-" + LONG, LONG), ("xoxb-1234567890-" + LONG, LONG),
    ("AKIAIOSFODNN7EXAMPLE " + AWS, AWS), ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN7"), ("AIza" + LONG + "abcdefg", LONG),
    (JWT, "dBjftJeZ4CVP"), (PEM, "S3cr3tBody"), (json.dumps({"file": PEM}), "S3cr3tBody"),
    (f"GET https://bucket.s3/x?X-Amz-Credential={LONG}&X-Amz-Signature={S}", S),
    (f"GET https://bucket.s3/x?X-Amz-Credential={LONG}&X-Amz-Signature={S}", LONG),
    (f"GET https://a.blob.core.windows.net/c/b?sv=2024-01-01&sr=b&sig={S}%3D", S),
    (f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={S}==;EndpointSuffix=x", S),
    (f"Server=db;User Id=u;Password={S};", S), (f"https://hooks.slack.com/services/T0000/B0000/{S}", S),
    (f"https://discord.com/api/webhooks/123456/{S}", S), (f"got 401 for Bearer {S}", S),
    (f"authorization: Basic {S}==", S), (f"Set-Cookie: sessionid={S}; Path=/", S),
    (f"Proxy-Authorization: Digest {S}", S), (f"password: {S}", S), (f"password: {S} (line 3)", S),
    ("token: onlyletters", "onlyletters"), (f"db:\n  user: u\n  passwd: '{S}'\n  port: 1", S),
    (f"- name: x\n  client_secret: {S}\n", S), (f"Config(hub_token='{S}', steps=3)", S),
    (f"kwargs={{'api_key': '{S}', 'n': 1}}", S), (f"MY_PASSWORD2 = {S}", S), (f"ran t.py --auth-token {S} --n 3", S),
    (f"PGPASSWORD={S} psql", S), (f"machine host login me password {S}", S), (f"npm_{LONG}", LONG),
    (f"wandb: key={LONG} api_key={S}", S), (f'os.environ["HF_TOKEN"] = "{S}"', S),
    (f'os.environ.setdefault("HF_TOKEN", "{S}")', S), (f"setenv HF_TOKEN {S}", S),
    (f"[('hub_token', '{S}'), ('x', 1)]", S), (f"token=SecretStr('{S}')", S), (f"Incorrect API key provided: {S}.", S),
    (f"Your API key is {S}", S), (f"Invalid token '{S}'", S), (f"password for user me: {S}", S),
    (f"token ({S}) is not valid", S), (f"| token | {S} |", S), (f"**token**: `{S}`", S), (f"token:\u00a0{S}", S),
    (f"\x1b[1mpassword\x1b[0m: {S}", S), (f"ran t.py --hub_token \\\n  {S}", S), (f"ran t.py --hub_token 'a b {S}'", S),
    ("ran t.py --password correcthorse --n 1", "correcthorse"), (f"hub_token: |\n  not {S}\nx: 1", S),
    (f"api_keys:\n  - first\n  - {S}\nother: 1", S), (f"credentials:\n  value: {S}\n  user: x\n", S),
    (f'token = """{S}"""', S), ("<settings><password>letters</password></settings>", "letters"),
    (f'variable "db_password" {{ default = "{S}" }}', S), (f"token%3D{S}", S), (quote(json.dumps({"token": S})), S),
    (base64.b64encode(f"HF_TOKEN={S}".encode()).decode(), base64.b64encode(f"HF_TOKEN={S}".encode()).decode()[:-2]),
    (f"curl --user me:{S} https://host", S), (f"sshpass -p {S} ssh host", S), (f"mysql -uroot -p{S} db", S),
    (f"scp x user:{S}@host.example.org:", S), (f"redis://:{S}@host:6379/0", S),
    (f"machine api.wandb.ai login user password {'abcdefghij' * 4}", "abcdefghij" * 4),
    (f"wandb login {'0123456789abcdef' * 2}01234567", "0123456789abcdef"), (f"xai-{LONG}", LONG),
    (f"tgp_v1_{LONG}", LONG), (f"lsv2_pt_{LONG}_0123456789", LONG), (f"dckr_pat_{LONG}", LONG),
    (f"glsa_{LONG}_0123abcd", LONG), (f"sntrys_{LONG}", LONG), (f"hf_oauth_{LONG}", LONG),
    (f"abc8Q~{LONG}abcdef", LONG), (f"1//0{LONG}{LONG}", LONG), (f"/data/me/models_hf_{LONG}123456/x", LONG),
    ("123456789:AAFbcdefGHIJKLmnopQRSTUvwxyz012345678", "bcdefGHIJKLmnop"),
    ("ms-01234567-89ab-cdef-0123-456789abcdef", "89ab-cdef"),
    (f"PuTTY-User-Key-File-2: ssh-rsa\nPrivate-Lines: 1\n{S}", S),
]  # fmt: skip
DATA: list[dict[str, Any]] = [
    {"token": S}, {"wandbKey": S}, {"headers": {"Authorization": f"Bearer {S}"}}, {"headers": {"x-api-key": S}},
    {"cookies": {"session": S}}, {"credentials": {"user": "u", "value": S}}, {"api_keys": [S]},
    {"password": 7351946285}, {"env": [{"name": "WANDB_API_KEY", "value": S}]},
    {"run": {"url": f"https://me:{S}@host/x"}}, {"text": json.dumps({"secret_key": S})}, {"args": ["--hub-token", S]},
    {"peft": [{"deep": [{"SSH_PRIVATE_KEY": S}]}]}, {"headers": [("Authorization", f"Bearer {S}")]},
    {"pairs": [["hub_token", S]]}, {"storage_options": {"key": S, "secret": "x"}}, {"wandb": {"key": S}},
    {"login": {"user": "u", "pass": S}}, {"db_pass": S}, {"creds": S}, {"tokenHF": S},
    {"env": [{"Variable": "HF_TOKEN", "Value": S}]}, {f"token={S}": 1}, {"set": {f"token={S}"}},
    {"bytes": f"token={S}".encode()}, {"object": SimpleNamespace(hub_token=S)}, {"error": ValueError(f"token={S}")},
    {"path": Path(f"/x/hf_{S}{S}")},
]  # fmt: skip


def words_of(text: str) -> list[str]:
    return text.split()


@pytest.fixture(autouse=True)
def _forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())


def _history(tmp_path: Path, text: str, data: Any) -> str:
    history = RunHistory(tmp_path)
    history.add("message", {"text": text, "values": data})
    history.close()
    return (tmp_path / HISTORY_NAME).read_text()


def _metrics(tmp_path: Path, text: str, data: Any) -> str:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write({"note": text, "values": data})
    writer.close()
    return (tmp_path / "metrics.jsonl").read_text()


def _log(tmp_path: Path, text: str, data: Any) -> str:
    logger, lines = get_logger("of.the.table"), []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(logging.Formatter().format(record))

    handler = Keeps()
    logger.addHandler(handler)
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("%s\n%s", text, data)
    finally:
        logger.removeHandler(handler)
    return "\n".join(lines)


def _outcome(tmp_path: Path, text: str, data: Any) -> str:
    outcomes.record_error(RuntimeError(f"{text}\n{data}"), {outcomes.VARIABLE: str(tmp_path)})
    return "".join(path.read_text() for path in tmp_path.iterdir())


def _header(tmp_path: Path, text: str, data: Any) -> str:
    from dataclasses import replace

    return "\n".join(header_lines(replace(SUMMARY, run_name=text, resumed_from=str(data))))


def _hyperparameters(tmp_path: Path, text: str, data: Any) -> str:
    args = TrainingArguments(output_dir=str(tmp_path), run_name=text, lr_scheduler_kwargs=None)
    return str(hyperparameters(args, None, lambda: {"ds": data, "text": text}))


def _arguments(tmp_path: Path, text: str, data: Any) -> str:
    args = TrainingArguments(output_dir=str(tmp_path), run_name=text, report_device_hour_price=None)
    return f"{args.to_json_string()} {args!r} {args.to_sanitized_dict()}"


def _escaped(_: Path, text: str, data: Any) -> str:
    """As others write it, which then stands in a message or a log: in JSON, in JSON of JSON, and as repr."""
    whole = f"of\n{text}\n{data}"
    return "\n".join(map(secrets.redacted, (json.dumps([whole]), json.dumps(json.dumps([whole])), repr([whole]))))


WRITERS: dict[str, Callable[[Path, str, Any], str]] = {
    "escaped": _escaped,
    "history": _history,
    "metrics": _metrics,
    "log": _log,
    "outcome": _outcome,
    "header": _header,
    "hyperparameters": _hyperparameters,
    "training_args.json": _arguments,
    "error": lambda _, text, data: str(ConfigError(f"{text}\n{data}")),
    "hang report": lambda path, text, data: write_report(path, f"{text}\n{data}").read_text(),
}
ROWS = [
    *((" ".join(words[1:3]), shlex.join(words), None, S) for words in COMMANDS),
    *((text.split("\n")[0], text, None, secret) for text, secret in TEXTS),
    *((str(data), "", data, str(data["password"]) if "password" in data else S) for data in DATA),
]


def test_the_table_has_more_than_sixty_ways() -> None:
    assert len({(text, str(data)) for _, text, data, _ in ROWS}) >= 140


@pytest.mark.parametrize("writer", WRITERS)
def test_no_secret_is_found_in(writer: str, tmp_path: Path) -> None:
    leaks = []
    for number, (name, text, data, secret) in enumerate(ROWS):
        folder = tmp_path / str(number)
        folder.mkdir()
        if secret in WRITERS[writer](folder, text, data):
            leaks.append(name)
    assert not leaks, "\n".join(leaks)


def test_no_secret_is_in_the_command_of_a_report() -> None:
    assert [words for words in COMMANDS if S in command_line(words)] == []
    assert S not in str(ConfigError(f"{S} is not known"))  # once found, the value is known wherever it appears


def test_values_of_the_environment_are_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_API_KEY", "from-the-environment-7")
    monkeypatch.setenv("MY_PASSWORD", "training")  # a word: it would be hidden in every sentence
    assert secrets.redacted("it was from-the-environment-7 of training") == "it was <SECRET> of training"


@pytest.mark.parametrize(
    "name",
    words_of(
        "num_tokens max_tokens pad_token eos_token eos_token_id label_key sort_key token_ids tokens n_token "
        "image_token key keys tokenizer tokens_per_second secrets_of_nature hub_token_file password_policy keyboard "
        "author passing primary_key special_tokens monkey patience compass PWD OLDPWD forward_pass one_pass pass "
        "num_passes token_type_ids tokenizer_hub credit hub_model_id wandb_project"
    ),
)
def test_other_names_are_not_secret(name: str) -> None:
    value = {name: "readable"}
    assert secrets.without_secrets(value) == value
    for text in (f"{name}=readable7", f"{name}: readable7 x", f"--{name} readable7", f'{{"{name}": "readable"}}'):
        assert secrets.redacted(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "commit 0a4d55a8d778e5022fab701977c5d840bbc486d0",
        "sha256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "/scratch/me/runs/2026-11-27/checkpoint-1000/model-00001-of-00002.safetensors",
        "seed=42, data_seed: 1234567890",
        "git@github.com:owner/name.git and ssh://git@github.com/owner/name",
        "https://host:8080/path@x?page=3&step=10",
        "hub_token: expected str, got int",
        "arguments.hub_token: null",
        "--hub-token needs a value",
        "the token: it ends a sentence",
        "1234567 tokens, basic of news, bearer of news",
        "step 10: loss 2.5, tokens/s: 12345678",
        "sk-learn and hf_hub, eyJ, AKIA, gsk_8",
        "hub_token=<HUB_TOKEN>",
        "use_auth_token=True, token=None",
        "Qwen/Qwen2.5-0.5B-Instruct, meta-llama/Llama-3.1-8B",
        "hub_token: null, hub_revision: 0a4d55a8d778e5022fab701977c5d840bbc486d0",
        "the token 'Qwen2ForCausalLM' of checkpoint-1000 at 2026-11-27T10:00:00",
        '{"hub_token": "<HUB_TOKEN>", "commit": "0a4d55a8d778e5022fab701977c5d840bbc486d0"}',
        "runs/Llama3p1B8InstructQLoRAr16a32lr2e5bs8 and file.py:12, a:b@c",
        "docker run -u 1000:1000 image:tag, 100%20 of%2Fit, TWFuIGlzIGRpc3Rpbmd1aXNoZWQ=",
        "one pass: 3 steps, backward pass=2, loss in a pass: x",
    ],
)
def test_readable_text_stays(text: str) -> None:
    assert secrets.redacted(text) == text


@pytest.mark.parametrize("text", [" ", "\\", '"api_key": {', "password: ", "a=b:", "--token ", "x://"])
def test_work_is_in_proportion_to_the_text(text: str) -> None:
    began = time.process_time()
    secrets.redacted(text * (100_000 // len(text)))
    assert time.process_time() - began < 3.0
