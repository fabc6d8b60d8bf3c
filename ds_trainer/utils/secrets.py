"""Redaction of tokens, keys and passwords in everything that is written, printed, logged or raised.

A secret is recognized by its name (:func:`is_secret`) in data, in ``NAME=VALUE`` and ``NAME: VALUE``, on a command line
and in the environment; by its shape (:func:`redacted`: tokens of known issuers, private keys, credentials in URLs); and
by its value, once it has been found (:func:`register_secret`), in text of other libraries.
"""

from __future__ import annotations

import functools
import os
import re
import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

_SHORTEST = 4  # a shorter value would match unrelated text
_SHORTEST_FOUND = 8  # of a value that nobody declared as a secret: "PASSWORD=test" must not hide every "test"
_HIDDEN = "<SECRET>"
_LONGEST_NAME, _LONGEST_CONTAINER = 200, 5000
_known: set[str] = set()


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Words of names: "wandbApiKey", "X-Api-Key" and "WANDB_API_KEY2" are wandb, api, key.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ALWAYS = _set(
    "password passwd passphrase passcode pwd secret credential apikey authorization cookie connectionstring dsn "
    "jwt webhook otp pat sas bearer auth"
)
_RUN_TOGETHER = _set(
    "password passwd passphrase apikey secretkey accesskey privatekey accountkey authtoken accesstoken apitoken "
    "clientsecret"
)
_OF_KEYS = _set(
    "api apis access private secret account encryption signing signature ssh rsa gpg pgp tls ssl auth service "
    "master subscription storage license client deploy ingestion instrumentation hub hf huggingface openai "
    "anthropic azure aws gcp google wandb comet neptune swanlab clearml mlflow dagshub trackio sendgrid stripe "
    "security admin root bearer webhook"
)
# A token of a text, of a model or of a count; "tokens" is a number of those unless one of _OF_TOKENS precedes it.
_NO_SECRET_TOKENS = _set(
    "n num max min pad padding eos bos unk unknown sep cls mask image audio video vision special added additional "
    "start end stop begin boi eoi boa eoa next last first prev previous per by prefix suffix middle fim turn role "
    "think separator delimiter placeholder text word sub byte character char new newline decoder encoder forced "
    "output input label class object latent query register sentinel skip seconds time cost loss price fill blank "
    "empty any each generated target source prompt response answer tool call padded"
)
_OF_TOKENS = _set("access auth api refresh bearer hub hf session id oauth personal secret security")
_ABOUT = _set(  # hub_token_file, password_length: what is named is no secret
    "file files path paths dir directory name names count length size limit policy type types field env variable "
    "required enabled url endpoint provider method mode scheme id ids index column expires expiry ttl sock"
)
_COMPOUNDS = (("connection", "string"), ("webhook", "url"), ("session", "id"), ("secret", "id"), ("set", "cookie"))

_SHAPES = re.compile(
    r"""
      -----BEGIN\ [A-Z0-9 ]*PRIVATE\ KEY(?:\ BLOCK)?-----.*?(?:-----END\ [A-Z0-9 ]*-----|\Z)
    | \bhf_[A-Za-z0-9]{16,} | \bapi_org_[A-Za-z0-9]{16,}
    | \bsk-[A-Za-z0-9_-]{16,}                                               # OpenAI, Anthropic and others
    | \b(?:sk|rk|pk|whsec)_(?:live_|test_)?[A-Za-z0-9]{16,}                  # Stripe
    | \bgh[pousr]_[A-Za-z0-9]{16,} | \bgithub_pat_[A-Za-z0-9_]{16,}
    | \bgl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|oas|imt)-[A-Za-z0-9_.-]{16,}
    | \bxox[abeoprs]-[A-Za-z0-9-]{8,} | \bxapp-[A-Za-z0-9-]{8,}
    | \b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}(?:[\s:,;/]+(?=[A-Za-z0-9/+]*[A-Z/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+]))?
    | \bAIza[A-Za-z0-9_-]{30,} | \bya29\.[A-Za-z0-9_-]{16,} | \bGOCSPX-[A-Za-z0-9_-]{16,}
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*              # JSON Web Token
    | \bnpm_[A-Za-z0-9]{16,} | \bpypi-[A-Za-z0-9_-]{16,} | \bdop_v1_[a-f0-9]{16,} | \bSG\.[\w-]{16,}\.[\w-]{16,}
    | \b(?:hvs|hvb)\.[A-Za-z0-9_-]{16,} | \bdapi[a-f0-9]{32}\b | \bnvapi-[A-Za-z0-9_-]{16,} | \bgsk_[A-Za-z0-9]{16,}
    | \br8_[A-Za-z0-9]{16,} | \bwandb_v1_[A-Za-z0-9_]{16,} | \bshp(?:at|ss|ca|pa)_[a-fA-F0-9]{16,}
    | \bAGE-SECRET-KEY-1[A-Z0-9]{16,} | \blin_api_[A-Za-z0-9]{16,} | \bpplx-[A-Za-z0-9]{16,}
    | (?<=hooks\.slack\.com/)[\w/.-]+ | (?<=/api/webhooks/)[\w/.-]+ | (?<=webhook\.office\.com/)[\w/@.-]+
    | (?<=api\.telegram\.org/)bot[\w:-]+
    """,
    re.VERBOSE | re.DOTALL,
)
_URL_CREDENTIALS = re.compile(r"(?<=://)(?!(?:git|hg|svn|ssh|root|user|anonymous)@)[^/\s'\"<>]+(?=@)")
_SCHEME = re.compile(r"\b((?i:bearer|basic))\s+(?=[^\s\"',]*(?:[\d=+/]|[a-z][A-Z])|\w{20})[\w.~+/=-]{8,}")
_URL_VALUE = re.compile(
    r"(?i)(?<=[?&;])((?:x-amz-|x-goog-)?(?:sig|signature|credential|key|code|sessionid))=[^&\s\"'<>]+"
)
_SEPARATOR = re.compile(r"""(?P<quote>\\{0,8}["']?)[ \t]{0,8}(?:=>|[:=])[ \t]*""")
_NAME_CHARACTERS = f"{string.ascii_letters}{string.digits}_.$-"
_QUOTED = re.compile(r"""[bru]?(?:(?P<mark>\\{1,8}["'])[^\n]*?(?P=mark)|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""")
_BARE = re.compile(r"""(?:[^\s,;&}\])"'<]|[,)](?=\S))+""")
_REST_OF_LINE = re.compile(r"[^\s<\"'][^\n\"'}]*")
_ANY_SCHEME = re.compile(r"(?i)(?:bearer|basic|token|digest|negotiate|apikey|aws4-hmac-sha256)[ \t]+")
_OPTION = re.compile(r"""(?<![\w-])(--?[A-Za-z][\w.-]*)(?:["'],)?[ \t]+["']?([^\s"'<-][^\s"']*)""")
_NETRC = re.compile(r"(?i)\b(passw(?:or)?d)[ \t]+(?=[^\s\"']*\d)[^\s\"'<]{8,}")
_NAME_AND_VALUE = re.compile(
    r"""(?<![\w.-])((?:name|key)["']?[:=][ \t]*["']?)([\w.-]+)"""
    r"""(["']?[,;]?\s+["']?value["']?[:=]\s*)("[^"\n]*"|'[^'\n]*'|[^\s"'}]+)"""
)
_BRACKET = re.compile(r"[\[\]{}]")
_END_OF_LINE = re.compile(r"""[ \t\r"'\\]{0,8}(?:\n|\Z)""")
_NO_VALUES = _set("none null true false expected ~ | > |- >-")
# After "token: ": a word of a sentence, or NAME=VALUE. Values have digits or length.
_PROSE = re.compile(r"[A-Za-z]{1,19}[.,;:!?]*|[\w.-]+=.*")


@functools.lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether ``name`` is that of a token, a key or a password: ``hub_token``, ``wandb.apiKey``, ``--db-passwd``.

    Names of the tokens of a text (``pad_token``, ``num_tokens``) and of other keys (``sort_key``) are not.
    """
    if name.lstrip("-") in ("PWD", "OLDPWD"):  # directories, in the environment of every shell
        return False
    *above, last = name.strip("\"' ").rsplit(".", 8)
    if any(word in ("secrets", "credentials", "passwords") for part in above for word in _words(part)):
        return True
    words = _words(last)
    if not words or (words[-1] in _ABOUT and tuple(words[-2:]) not in _COMPOUNDS):
        return False
    ending, before = words[-1], words[-2] if len(words) > 1 else ""
    singular = ending.removesuffix("s") if ending not in ("sas", "dns") else ending
    if tuple(words[-2:]) in _COMPOUNDS or singular in _ALWAYS or singular.endswith(tuple(_RUN_TOGETHER)):
        return True
    if singular == "key":
        return before in _OF_KEYS
    if singular == "token":
        return before in _OF_TOKENS if ending == "tokens" else before not in _NO_SECRET_TOKENS
    # hub_token_read, secret_value, PASSWORD_OLD; not "secrets_of_nature"
    return any(word in ("password", "passwd", "passphrase", "secret", "apikey") for word in words)


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def masked(name: str) -> str:
    """The placeholder for the secret ``name``; the same whether it is set or not."""
    return f"<{name.upper()}>"


def without_secrets(value: Any) -> Any:
    """``value`` with all masked whose name is that of a secret, at any depth, and every text :func:`redacted`."""
    if isinstance(value, Mapping):
        named = str(value.get("name") or value.get("key") or "")  # {"name": "WANDB_API_KEY", "value": "..."}
        return {
            name: masked(named)
            if name == "value" and isinstance(entry, str) and is_secret(named)
            else _masked_leaves(entry, masked(str(name)))
            if is_secret(str(name))
            else without_secrets(entry)
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return _without_pairs([without_secrets(entry) for entry in value])
    return redacted(value) if isinstance(value, str) else value


def _masked_leaves(value: Any, text: str) -> Any:
    """Below the name of a secret: every text and number."""
    if isinstance(value, Mapping):
        return {name: _masked_leaves(entry, text) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_masked_leaves(entry, text) for entry in value]
    return value if value is None or isinstance(value, bool) or value == "" else text


def _without_pairs(words: list[Any]) -> list[Any]:
    """A list of words in which an option has its value behind it: ``["--token", "abc"]``."""
    for number, word in enumerate(words[1:], 1):
        before = words[number - 1]
        if isinstance(word, str) and isinstance(before, str) and _is_option(before) and not word.startswith("--"):
            words[number] = masked(_field(before))
    return words


def _is_option(word: str) -> bool:
    return word.startswith("-") and "=" not in word and " " not in word and is_secret(word)


def _field(word: str) -> str:
    return word.lstrip("-").rpartition(".")[2].replace("-", "_")


def command_words(words: Sequence[str]) -> list[str]:
    """The words of a command line, with secrets masked by the names of their options."""
    _known.update(_values_of_words(tuple(words)))
    shown: list[str] = without_secrets(list(words))
    return shown


@functools.lru_cache(maxsize=16)
def _values_of_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """The values of options that have the name of a secret: ``--token abc``, ``--token=abc``."""
    values = []
    for before, word in zip(("", *words), words, strict=False):
        name, equals, value = word.partition("=")
        if equals and is_secret(name):
            values.append(value)
        elif _is_option(before) and not word.startswith("--"):
            values.append(word)
    return tuple(value for value in values if _is_distinctive(value))


def register_secret(value: str | None) -> None:
    """Have :func:`redacted` and :func:`ds_trainer.utils.logging.hide_in_logs` redact ``value`` from now on."""
    if value is not None and len(value) >= _SHORTEST:
        _known.update({value, quote(value, safe="")})


def _is_distinctive(value: str) -> bool:
    return len(value) >= _SHORTEST_FOUND and (not value.isalpha() or len(value) >= 2 * _SHORTEST_FOUND)


def register_secrets_of(value: Any) -> None:
    """:func:`register_secret` for every string in ``value`` whose name is that of a secret."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if isinstance(entry, str) and is_secret(str(name)):
                register_secret(entry)
            else:
                register_secrets_of(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            register_secrets_of(entry)


def redacted(text: str) -> str:
    """``text`` without secrets: registered ones, those of the environment, and those that name or shape give away."""
    own = _values_of_words(tuple(sys.orig_argv))
    for secret in sorted({*_known, *_of_environment(), *own}, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    text = _SHAPES.sub(_HIDDEN, text)
    if "://" in text:
        text = _URL_CREDENTIALS.sub(_HIDDEN, text)
    text = _URL_VALUE.sub(rf"\1={_HIDDEN}", text)
    text = _NETRC.sub(rf"\1 {_HIDDEN}", _SCHEME.sub(rf"\1 {_HIDDEN}", text))
    text = _NAME_AND_VALUE.sub(
        lambda found: f'{found[1]}{found[2]}{found[3]}"{_HIDDEN}"' if is_secret(found[2]) else found.group(), text
    )
    return _without_options(_without_named(text))


def _of_environment() -> Iterable[str]:
    """Values of the environment variables that have the name of a secret."""
    values = [value for name, value in os.environ.items() if is_secret(name) and _is_distinctive(value)]
    return [value for value in values if not (value.startswith("/") and os.path.exists(value))]  # it names a file


def _without_named(text: str) -> str:
    """``text`` without the values of ``NAME=VALUE``, ``NAME: VALUE`` and ``"NAME": "VALUE"``, if NAME is a secret's."""
    flow = text.lstrip().startswith(("{", "["))
    parts: list[str] = []
    done = 0
    for sign in _SEPARATOR.finditer(text):
        before = text[max(done, sign.start() - _LONGEST_NAME) : sign.start()]
        name = before[len(before.rstrip(_NAME_CHARACTERS)) :]
        if sign.start() < done or not name or not is_secret(name):
            continue
        if (end := _end_of_container(text, sign.end())) is not None:
            parts += [text[done : sign.end()], f'"{_HIDDEN}"']
            done = end
            continue
        quoted = _QUOTED.match(text, sign.end())
        value = quoted or _bare_value(text, sign, name, flow)
        if value is None:
            continue
        shown = _HIDDEN
        if quoted or flow:
            mark = quoted["mark"] if quoted and quoted["mark"] else '"'  # \\": JSON in a string of JSON
            shown = f"{mark}{_HIDDEN}{mark}"
        if value.group().strip("\"'\\").startswith("<"):  # a placeholder
            shown = value.group()
        parts += [text[done : value.start()], shown]
        done = value.end()
    return "".join([*parts, text[done:]]) if parts else text


def _end_of_container(text: str, start: int) -> int | None:
    """Where the list or mapping ends that begins at ``start``; None if there is none."""
    if text[start : start + 1] not in ("[", "{") or text[start + 1 : start + 2] in ("%", "{", "#"):
        return None
    depth = 0
    for found in _BRACKET.finditer(text, start, start + _LONGEST_CONTAINER):
        depth += 1 if found.group() in "[{" else -1
        if depth == 0:
            return found.end()
    return None


def _bare_value(text: str, sign: re.Match[str], name: str, flow: bool) -> re.Match[str] | None:
    """The value without quotes behind ``sign``; None if that is a word of a sentence, or nothing."""
    colon = ":" in sign.group()
    if colon and _words(name)[-1] in ("authorization", "cookie"):
        scheme = _ANY_SCHEME.match(text, sign.end())
        return _REST_OF_LINE.match(text, scheme.end() if scheme else sign.end())
    value = _BARE.match(text, sign.end())
    if value is None or value.group().rstrip(".,;:").lower() in _NO_VALUES:
        return None
    spaced = colon and sign.group()[-1] in " \t" and not sign["quote"]
    last = _END_OF_LINE.match(text, value.end()) is not None
    return None if spaced and not flow and not last and _PROSE.fullmatch(value.group()) else value


def _without_options(text: str) -> str:
    """``text`` without the values behind options: ``--token abc1``. ``--token needs a value`` stays as it is."""

    def shown(found: re.Match[str]) -> str:
        option, value = found.groups()
        if not is_secret(option) or _PROSE.fullmatch(value):
            return found.group()
        return found.group()[: found.start(2) - found.start()] + _HIDDEN

    return _OPTION.sub(shown, text) if "-" in text else text
