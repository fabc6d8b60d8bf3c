"""Redaction of tokens, keys and passwords in everything that is written, printed, logged or raised.

A secret is recognized by its name (:func:`is_secret`) in data, in ``NAME=VALUE`` and ``NAME: VALUE``, on a command line
and in the environment; by its shape (:func:`redacted`: tokens of known issuers, private keys, credentials in URLs); and
by its value, once it has been found (:func:`register_secret`), in text of other libraries.
"""

from __future__ import annotations

import base64
import functools
import os
import re
import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

from ds_trainer.utils.secret_names import SERVICES, words_of
from ds_trainer.utils.secret_names import is_secret as is_secret

_SHORTEST = 4  # a shorter value would match unrelated text
_SHORTEST_FOUND = 8  # of a value that nobody declared as a secret: "PASSWORD=test" must not hide every "test"
_HIDDEN = "<SECRET>"
_LONGEST_NAME, _LONGEST_CONTAINER = 200, 5000
_known: set[str] = set()


_NAMES, _VALUES = ("name", "key", "variable", "var", "env", "option", "header"), ("value", "val")

# Where a word begins: behind what is no part of one, or "\\n" and "%3D" of a text that was written into another.
_START = r"(?:\b|(?<=\\[nrtbf])|(?<=\\u[\da-f]{4})|(?<=%[\dA-F]{2}))"
_SHAPES = r"""
      -----BEGIN\ [A-Z0-9 ]*PRIVATE\ KEY(?:\ BLOCK)?-----.*?(?:-----END\ [A-Z0-9 ]*-----|\Z)
    | \bhf_[A-Za-z0-9]{16,} | hf_[A-Za-z0-9]{30,} | \bapi_org_[A-Za-z0-9]{16,}
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
    | \bAGE-SECRET-KEY-1[A-Z0-9]{16,} | \blin_api_[A-Za-z0-9]{16,} | \b(?:pplx|xai|HRKU|PMAK|NRAK|tvly)-[\w-]{16,}
    | \b(?:hf_oauth|hf_jwt|tgp_v1|fw|lsv2_(?:pt|sk)|pscale_[a-z]+|sntry[su]|glsa|glc|dckr_[po]at|sbp|jina|ntn|secret
       |figd|rubygems|lsk|e2b)_(?=[\w.-]*\d)[\w.-]{20,}
    | \bdp\.[a-z]{2,5}\.\w{32,} | \bAT(?:ATT|CTT|BBT)3\w{16,} | \b1//0[\w-]{32,} | \bLTAI(?=\w*\d)\w{12,26}
    | \b[\w~.-]{3}\dQ~[\w~.-]{31,34} | \b[0-9a-f]{32}-us\d{1,2}\b | \b(?:key-|SK|ms-)[0-9a-f-]{32,36}\b
    | \b\d{8,10}:AA[\w-]{33} | \b[MNO][\w-]{22,26}\.[\w-]{6}\.[\w-]{27,38} | PuTTY-User-Key-File-\d:.*
    | (?<=hooks\.slack\.com/)[\w/.-]+ | (?<=/api/webhooks/)[\w/.-]+ | (?<=webhook\.office\.com/)[\w/@.-]+
    | (?<=api\.telegram\.org/)bot[\w:-]+
    """
_SHAPE, _ESCAPED_SHAPE = (
    re.compile(_SHAPES.replace("| \\b", f"| {start}"), re.VERBOSE | re.DOTALL) for start in ("\\b", _START)
)
_URL_CREDENTIALS = re.compile(r"(?<=://)(?!(?:git|hg|svn|ssh|root|user|anonymous)@)[^/\s'\"<>]+(?=@)")
_SCHEME = re.compile(r"\b((?i:bearer|basic))\s+(?=[^\s\"',]*(?:[\d=+/]|[a-z][A-Z])|\w{20})[\w.~+/=-]{8,}")
_URL_VALUE = re.compile(
    r"(?i)(?<=[?&;])((?:x-amz-|x-goog-)?(?:sig|signature|credential|key|code|sessionid))=[^&\s\"'<>]+"
)
_SEPARATOR = re.compile(r"""(?P<quote>\\{0,8}["']?)[ \t]{0,8}(?:=>|:=|[:=])[ \t]*(?:!!?\w{1,16}[ \t]+)?""")
_NAME_CHARACTERS = f"{string.ascii_letters}{string.digits}_.$-"
_QUOTED = re.compile(
    r"""(?:\w{1,32}\(|[bru])?(?:(?:\\{0,4}"){3}[^"]+"(?:\\{0,4}"){2}|(?P<mark>\\{1,8}["'])[^\n]*?(?P=mark)|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
)
_BARE = re.compile(r"""(?:(?!\\{1,4}n)[^\s,;&}\])"'<]|[,)](?=\S))+""")
_REST_OF_LINE = re.compile(r"[^\s<\"'](?:(?!\\{1,4}n)[^\n\"'}])*")
_ANY_SCHEME = re.compile(r"(?i)(?:bearer|basic|token|digest|negotiate|apikey|aws4-hmac-sha256)[ \t]+")
_OPTION = re.compile(r"""(?<![\w-])(--?[A-Za-z][\w.-]*)(?:["'],)?[ \t]+["']?((?<=')[^'\n]+(?=')|[^\s"'<\\-][^\s"']*)""")
# Where a secret has no name: words of netrc, user:word@host.org, curl -u user:word, sshpass -p word, mysql -pword.
_PLACES = re.compile(
    r"""\b((?i:passw(?:or)?d)[ \t]+(?=[^\s"']*\d|\w{20}))[^\s"'<]{8,}"""
    r"""|((?<![\w.+-])[\w.+-]{1,64}:|\bthin:\w{1,64}/)[^\s:/@"'<>]{6,}(?=@[\w-]+(?:\.[\w-]+){0,8}[.:][a-z\d]{2})"""
    r"""|((?<!\S)(?:-u|--user|--proxy-user)[ =]["']?[\w.@+-]{1,64}:)(?!\d+\b)[^\s"'<>]+"""
    rf"""|({_START}(?:sshpass|login|mysql\w*)\b[^\n|;&]{{0,99}}?\s-p[ ]?["']?)(?=[^\s"']*\d)[^\s"'<>]{{6,}}"""
)
_ELEMENT = re.compile(r"(<([\w.-]{1,64})>)[^<>\n]+(?=</)")
_NAME_AND_VALUE = re.compile(
    r"""(?<![\w.-])((?i:name|key|variable|var|env|option|header)["']?[:=][ \t]*["']?)([\w.-]+)"""
    r"""(["']?[,;]?\s+["']?(?i:value|val)["']?[:=]\s*)("[^"\n]*"|'[^'\n]*'|[^\s"'}]+)"""
)
_BRACKET = re.compile(r"[\[\]{}]")
_LINE = r"(?:\n|\\{1,4}n)%s(?:(?!\\{1,4}n)[^\n])+"
_LINES = re.compile(  # of YAML: a block of text, a list, a mapping of secrets
    rf"[|>][+-]?\d?[ \t\r]*(?:{_LINE % '[ ]+'})+|\r?(?:{_LINE % '[ ]*-[ ]+'})+"
    rf"|(?:(?<=credentials:)|(?<=secrets:)|(?<=passwords:))\r?(?:{_LINE % '[ ]+'})+"
)
# What stands behind a name without a separator: "Your API key is X", environ["TOKEN"] = "X", ("token", "X").
_RANDOM, _CHANGE = re.compile(r"[\w+/~.-]{12,}={0,2}"), re.compile(r"(?<=\d)[A-Za-z]|(?<=[A-Za-z])\d")
_PHRASE = re.compile(r"(?<![<\w])[A-Za-z_][\w.-]*(?:[ ](?:key|token))?")
_BETWEEN = re.compile(
    r"(?:[^\w:=]|\b(?!none|null|true|false|auto|sha|commit|revision|hash|digest|path|file|id\b)[a-z]{1,9}\b)*"
    r"(?:[:=]{1,3}(?:[^\w:=]|\b[a-z]{1,9}\b)*)?"
)
_BARE_NAME = re.compile(r"""["'](?:key|pass)\\*["']: \\*["']\Z|(\w+)\W{1,3}key[:=][ ]?\Z""")  # {"wandb": {"key": "X"}}
_ESCAPE = re.compile(r"(?:\x1b|\\x1b|\\u001b)\[[\d;]*m|\\[nrt]|\\u00a0|\\xa0")
_BASE64, _PERCENT = (
    re.compile(r"(?:(?<=\\[nrt])|(?<![\w+/\\-]))[\w+/-]{24,}={0,2}", re.ASCII),
    re.compile(r"[^\s\"'<>]*?%[0-9A-Fa-f]{2}[^\s\"'<>]*"),
)
_END_OF_LINE = re.compile(r"""\\{1,4}n|[ \t\r"'\\]{0,8}(?:\n|\Z)""")
_NO_VALUES = ["none", "null", "true", "false", "expected", "~", "|", ">", "|-", ">-"]
# After "token: ": a word of a sentence, or NAME=VALUE. Values have digits or length.
_PROSE = re.compile(r"[A-Za-z]{1,19}[.,;:!?]*|[\w.-]+=.*")


def masked(name: str) -> str:
    """The placeholder for the secret ``name``; the same whether it is set or not."""
    return f"<{name.upper()}>"


def without_secrets(value: Any, above: str = "") -> Any:
    """``value`` with all masked whose name is that of a secret, at any depth, and every text :func:`redacted`.

    ``above`` is the name of ``value``. Objects other than numbers and arrays that show a secret become text.
    """
    if isinstance(value, Mapping):
        lower = {str(name).lower(): entry for name, entry in value.items()}
        named = str(next((lower[name] for name in _NAMES if lower.get(name)), ""))  # name: WANDB_API_KEY, value: ...
        login = not lower.keys().isdisjoint(("user", "username", "login", "secret"))  # user and pass, key and secret

        def shown(name: str, entry: Any) -> Any:
            secret = name if is_secret(name) or is_secret(f"{above}.{name}") else ""
            if name.lower() in _VALUES and isinstance(entry, str) and is_secret(named):
                secret = named
            elif login and name.lower() in ("pass", "key") and isinstance(entry, str):
                secret = name
            return _masked_leaves(entry, masked(secret)) if secret else without_secrets(entry, name)

        def as_key(name: Any) -> Any:  # a token that is called "text" must not hide a key of the records
            return redacted(name) if isinstance(name, str) and len(name) >= _SHORTEST_FOUND else name

        return {as_key(name): shown(str(name), value[name]) for name in value}
    if isinstance(value, list | tuple | set | frozenset):
        entries = [without_secrets(entry) for entry in value]
        return type(value)(entries) if isinstance(value, set | frozenset) else _without_pairs(entries)
    if isinstance(value, str):
        return redacted(value)
    if value is None or isinstance(value, int | float) or type(value).__module__.startswith(("torch", "numpy")):
        return value
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    hidden = redacted(text)
    return value if hidden == text else hidden


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
        if not (isinstance(word, str) and isinstance(before, str)) or word.startswith("--"):
            continue
        pair = len(words) == 2 and (_is_random(word) or " " in word) and is_secret(before)  # ("token", "abc")
        if pair or _is_option(before) or (before == "login" and _is_random(word)):
            words[number] = masked(_field(before))
        elif before in ("-u", "--user", "--proxy-user"):
            words[number] = redacted(f"-u {word}").removeprefix("-u ")
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
    if "://" in text:  # first, because a user's name may have the shape of a key
        text = _URL_CREDENTIALS.sub(_HIDDEN, text)
    text = (_ESCAPED_SHAPE if "\\" in text or "%" in text else _SHAPE).sub(_HIDDEN, text)
    text = _SCHEME.sub(rf"\1 {_HIDDEN}", _URL_VALUE.sub(rf"\1={_HIDDEN}", text))
    text = _PLACES.sub(lambda match: f"{match[match.lastindex or 0]}{_HIDDEN}", text)
    text = _NAME_AND_VALUE.sub(
        lambda match: f'{match[1]}{match[2]}{match[3]}"{_HIDDEN}"' if is_secret(match[2]) else match.group(), text
    )
    text = _ELEMENT.sub(lambda match: f"{match[1]}{_HIDDEN}" if is_secret(match[2]) else match.group(), text)
    text = _RANDOM.sub(_without_near, _without_options(_without_named(text)))
    text = _BASE64.sub(_without_encoded, text)
    return _PERCENT.sub(_without_encoded, text) if "%" in text else text


def _is_random(word: str) -> bool:
    """Whether nobody would have written ``word``: letters and digits by turns, or a long number in hexadecimal."""
    return any(len(_CHANGE.findall(part)) >= 3 for part in re.findall(r"[A-Za-z0-9]{10,}", word)) or bool(
        re.search(r"[0-9a-f]{24}", word)
    )


def _without_near(match: re.Match[str]) -> str:
    """A random word, hidden if what precedes it ends in the name of a secret and a few words of a phrase."""
    word = match.group()
    if _is_random(word):
        before = _ESCAPE.sub(" ", match.string[max(0, match.start() - 64) : match.start()])
        bare = _BARE_NAME.search(before)
        if bare and bare[1] in (None, *SERVICES):
            return _HIDDEN
        for name in _PHRASE.finditer(before):
            if (is_secret(name.group()) or name.group() == "login") and _BETWEEN.fullmatch(before, name.end()):
                return _HIDDEN
    return word


def _without_encoded(match: re.Match[str]) -> str:
    """A word in base64 or with ``%3D``, hidden or decoded if what it says is a secret."""
    word = match.group()
    if "%" in word:
        text = unquote(word)
        return word if text == word or (hidden := redacted(text)) == text else hidden
    try:
        text = base64.b64decode(word.rstrip("=") + "==", "-_" if "-" in word or "_" in word else None).decode("ascii")
    except ValueError:
        return word
    return word if redacted(text) == text else _HIDDEN


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
        rest = before.rstrip(_NAME_CHARACTERS)
        name = before[len(rest) + rest.endswith("\\") :]  # the n of "\\n" is no part of it
        if sign.start() < done or not name or not is_secret(name):
            continue
        if (end := _end_of_container(text, sign.end())) is not None:
            parts += [text[done : sign.end()], f'"{_HIDDEN}"']
            done = end
            continue
        quoted = _QUOTED.match(text, sign.end())
        lines = _LINES.match(text, sign.end()) if ":" in sign.group() else None
        value = quoted or lines or _bare_value(text, sign, name, flow)
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
    for match in _BRACKET.finditer(text, start, start + _LONGEST_CONTAINER):
        depth += 1 if match.group() in "[{" else -1
        if depth == 0:
            return match.end()
    return None


def _bare_value(text: str, sign: re.Match[str], name: str, flow: bool) -> re.Match[str] | None:
    """The value without quotes behind ``sign``; None if that is a word of a sentence, or nothing."""
    colon = ":" in sign.group()
    if colon and words_of(name)[-1] in ("authorization", "cookie"):
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

    def shown(match: re.Match[str]) -> str:
        option, value = match.groups()
        more = len(value) >= _SHORTEST_FOUND and text.startswith(" -", match.end())  # --password abcdefgh -n 1
        if not is_secret(option) or (_PROSE.fullmatch(value) and not more):
            return match.group()
        return match.group()[: match.start(2) - match.start()] + _HIDDEN

    return _OPTION.sub(shown, text) if "-" in text else text
