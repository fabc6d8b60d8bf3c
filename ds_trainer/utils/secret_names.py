"""Names of tokens, keys and passwords, told from those of the tokens of a text and of other keys."""

from __future__ import annotations

import functools
import re


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Words of names: "wandbApiKey", "X-Api-Key" and "WANDB_API_KEY2" are wandb, api, key.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ALWAYS = _set(
    "password passwd passphrase passcode pwd pw secret credential cred apikey authorization cookie connectionstring "
    "dsn jwt webhook otp pat sas bearer auth sessionid hmac"
)
_RUN_TOGETHER = _set(
    "password passwd passphrase apikey secretkey accesskey privatekey accountkey authtoken accesstoken apitoken "
    "clientsecret"
)
SERVICES = _set(
    "hub hf huggingface wandb comet neptune swanlab clearml mlflow github gitlab openai anthropic aws azure"
)
_OF_KEYS = SERVICES | _set(
    "api apis access private secret account encryption signing signature ssh rsa gpg pgp tls ssl auth service "
    "master subscription storage license client deploy ingestion instrumentation gcp google dagshub trackio sendgrid "
    "stripe security admin root bearer webhook fernet hmac jwt session slack"
)
_OF_PASS = _set("db database user smtp ftp proxy mysql postgres pg redis mongo admin root login")  # not forward_pass
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
_COMPOUNDS = [
    tuple(pair.split())
    for pair in ("connection string", "access signature", "webhook url", "session id", "secret id", "set cookie")
]


@functools.lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether ``name`` is that of a token, a key or a password: ``hub_token``, ``wandb.apiKey``, ``--db-passwd``.

    Names of the tokens of a text (``pad_token``, ``num_tokens``) and of other keys (``sort_key``) are not.
    """
    if name.lstrip("-").rpartition(".")[2] in ("PWD", "OLDPWD"):  # directories, in the environment of every shell
        return False
    *above, last = name.strip("\"' ").rsplit(".", 8)
    if any(word in ("secrets", "credentials", "passwords") for part in above for word in words_of(part)):
        return True
    words = words_of(last)
    if not words or (words[-1] in _ABOUT and tuple(words[-2:]) not in _COMPOUNDS):
        return False
    ending, before = words[-1], words[-2] if len(words) > 1 else ""
    singular = ending.removesuffix("s") if ending not in ("sas", "dns") else ending
    if tuple(words[-2:]) in _COMPOUNDS or singular in _ALWAYS or singular.endswith(tuple(_RUN_TOGETHER)):
        return True
    if singular == "key":
        return before in _OF_KEYS or (not before and bool(above) and above[-1].lower() in SERVICES)  # wandb.key
    if singular == "token":
        return before in _OF_TOKENS if ending == "tokens" else before not in _NO_SECRET_TOKENS
    if ending == "pass":
        return before in _OF_PASS
    # hub_token_read, secret_value, PASSWORD_OLD; not "secrets_of_nature"
    return any(word in ("password", "passwd", "passphrase", "secret", "apikey") for word in words) or (
        "token" in words and not SERVICES.isdisjoint(words)
    )


def words_of(name: str) -> list[str]:
    """The words of a name, in lower case."""
    return [word.lower() for word in _WORD.findall(name)]
