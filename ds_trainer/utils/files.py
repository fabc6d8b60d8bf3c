"""Atomic writes, and reading of files that a user names."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
MOST_BYTES = 16 * 2**20
"""How large a file of settings may be that a user names."""
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # PATH_MAX without its end, NAME_MAX
_cannot_flush = False  # said already
_ABANDONED = 24 * 3600  # seconds after which an incomplete directory of another host is removed


def write_text_atomic(path: str | os.PathLike[str], text: str, private: bool = False) -> None:
    """Write ``text`` to a temporary file next to ``path``, flush it to the disk and rename it to ``path``.

    A symbolic link at ``path`` is replaced; what it points at stays.

    Args:
        path: the file; missing directories are created.
        text: written as UTF-8.
        private: only the owner may read it, because it may hold secrets; otherwise the umask decides.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            flush(stream.fileno())
        os.replace(partial, target)
    except BaseException as error:
        with suppress(OSError):  # it does not exist
            partial.unlink()
        if isinstance(error, OSError):  # the user knows no temporary file
            error.filename = str(target)
            if error.filename2 is not None:
                del error.filename2  # None would be shown
        raise


def new_partial(final: Path) -> Path:
    """Create and return a hidden directory beside ``final``, to be renamed to it once it is complete.

    What processes that were killed have left is removed: of this host at once, of others after a day.

    Raises:
        OSError: it cannot be created.
    """
    host = socket.gethostname()
    pattern = re.compile(rf"\.{re.escape(final.name)}\.(.+)\.(\d+)\.[0-9a-f]{{8}}\.(partial|damaged)")
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.{host}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    now = partial.stat().st_mtime  # by the clock of the file system, which may not be that of this host
    for path in final.parent.iterdir():
        if match := pattern.fullmatch(path.name):
            with suppress(OSError):  # another process has removed it
                old = not _is_running(int(match[2])) if match[1] == host else now - path.stat().st_mtime > _ABANDONED
                if old:
                    shutil.rmtree(path, ignore_errors=True)
    return partial


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # of another user
        return True
    return True


def own_files(directory: Path) -> None:
    """Replace links to files in ``directory``, hard ones too, by copies: writing to them must change no file elsewhere.

    Links to files of 64 MiB and more stay: those are weights, not configurations, tokenizers or cards.
    """
    for path in directory.iterdir() if directory.is_dir() else ():
        if not path.is_dir() and (path.is_symlink() or path.lstat().st_nlink > 1):
            content = path.read_bytes() if path.is_file() and path.stat().st_size < 2**26 else None
            if content is not None or not path.exists():
                path.unlink()
            if content is not None:
                path.write_bytes(content)


def new_output(path: str | os.PathLike[str], source: str, kind: str = "file") -> Path:
    """``path`` with the home directory in place of ``~``, where a subcommand writes: what is there is never replaced.

    Raises:
        ConfigError: something is there, other than an empty directory for a ``kind`` of ``"directory"``.
    """
    target = Path(path).expanduser()
    is_free = kind == "directory" and target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if os.path.lexists(target) and not is_free:
        content = " and is not empty" if kind == "directory" else ""
        raise ConfigError(f"{source} {path} exists{content}. Name a new {kind}, or remove it.")
    return target


def flush(descriptor: int) -> None:
    """Wait until everything that was written to a file, or to the entries of a directory, is on disk.

    A mount that cannot do that (directories with some FUSE and SMB servers) is no reason to fail: all that has been
    written is there as long as the machine lives. It is said once.

    Raises:
        OSError: the disk failed.
    """
    global _cannot_flush
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        if not _cannot_flush:
            _cannot_flush = True
            logger.warning(
                "A file system cannot flush files or directories to its disk (fsync: %s). If the machine loses power, "
                "the newest checkpoint may be incomplete; a resume then takes the one before.",
                error.strerror,
            )


def flush_path(path: str | os.PathLike[str]) -> None:
    """:func:`flush` for a file or a directory that is not open."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON value in ``path``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, nested too deeply, or not in a regular file, which could wait forever or never end.
    """
    if named := next((text for test, text in _KINDS if test(os.stat(path).st_mode)), None):
        raise ValueError(f"it is {named}")
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def user_cache(environment: Mapping[str, str] | None = None) -> Path:
    """The directory for what runs of a user keep: ``$XDG_CACHE_HOME/ds_trainer``, by default in ``~/.cache``."""
    environment = os.environ if environment is None else environment
    return Path(environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")) / "ds_trainer"


def read_user_file(path: str | os.PathLike[str], source: str, kind: str, most: int = MOST_BYTES) -> str:
    """The text of a file that the user named, without a byte order mark.

    Args:
        path: as given; ``~`` is the home directory.
        source: how the user named it, the subject of every error: ``"deepspeed=x.json"``, ``"The recipe 'a.yaml'"``.
        kind: the expected kind of file: ``"JSON file"``.
        most: bytes that such a file may have.

    Raises:
        ConfigError: the file does not exist, is no regular file (a directory, a named pipe, a device: reading it could
            wait forever, or never end), is too large, is not UTF-8 text, or cannot be read.
    """
    source = shortened(source)
    data = read_bytes(path, source, kind, most)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text (byte {error.start}); is it a {kind}?") from None
    if "\0" in text:
        raise ConfigError(f"{source} has a NUL byte at {text.index(chr(0)):,}; is it a {kind}?")
    return text


def read_bytes(path: str | os.PathLike[str], source: str, kind: str, most: int = MOST_BYTES) -> bytes:
    """The content of a file for :func:`read_user_file`, which describes arguments and errors."""
    try:
        descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as stream:
            mode = os.fstat(descriptor).st_mode
            data = stream.read(most + 1) if stat.S_ISREG(mode) else b""
    except FileNotFoundError:
        problem = directory_problem(path) or f"does not exist (working directory: {_working_directory()})"
        raise ConfigError(f"{source} {problem}.") from None
    except IsADirectoryError:
        raise ConfigError(f"{source} is a directory; name a {kind} in it.") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        if getattr(error, "errno", None) == errno.ENXIO:
            raise ConfigError(f"{source} is a socket; name a {kind}.") from None
        raise ConfigError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{source} is a directory; name a {kind} in it.")
    if not stat.S_ISREG(mode):
        named = next((text for test, text in _KINDS if test(mode)), "not a regular file")
        raise ConfigError(f"{source} is {named}; write its content to a {kind} and name that.")
    if data is None:
        raise ConfigError(f"{source} has no content now, although it is a file; write its content to a {kind}.")
    if len(data) > most:
        raise ConfigError(f"{source} is larger than {most / 2**20:g} MiB; is it a {kind}?")
    return data


def read_user_json(path: str | os.PathLike[str], source: str) -> Any:
    """The JSON value in a file that the user named.

    Raises:
        ConfigError: see :func:`read_user_file`; or the text is not valid JSON.
    """
    return json_of(read_user_file(path, source, "JSON file"), source)


def parse_json(text: str | bytes) -> Any:
    """``json.loads``; text that is nested too deeply is a ValueError, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def text_with_digest(values: Mapping[str, Any], indent: int | None = None) -> str:
    """``values`` as a line or lines of JSON whose last entry, ``digest``, is a SHA-256 of all others."""
    return json.dumps({**values, "digest": _digest(values)}, indent=indent, ensure_ascii=False) + "\n"


def read_with_digest(path: Path, indent: int | None = None) -> dict[str, Any] | None:
    """The values in a file of :func:`text_with_digest`; None if it has changed since it was written.

    Raises:
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values: dict[str, Any] = parse_json(text)
        del values["digest"]
        return values if text == text_with_digest(values, indent) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def json_of(text: str, source: str) -> Any:
    """The JSON value in ``text``, which ``source`` names in errors.

    Raises:
        ConfigError: the text is not valid JSON, is nested too deeply, or has a number with too many digits.
    """
    source = shortened(source)
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}.") from None
    except ValueError:  # Python's limit of the digits of an integer
        raise ConfigError(f"{source} has an integer with too many digits.") from None


def shortened(text: str, most: int = 300) -> str:
    """``text``; of a longer one its beginning and its end, and how long it is."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 6 :]} ({len(text):,} characters)"


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is something at ``path``, be it a link to nothing; not if it cannot be a path."""
    try:
        os.lstat(os.path.expanduser(path))
    except (OSError, ValueError):
        return False
    return True


def directory_problem(path: str | os.PathLike[str]) -> str | None:
    """What is at ``path`` in place of a directory, as the end of a sentence; None if a directory is, or nothing."""
    path = os.path.expanduser(path)
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISDIR(mode):
            return f"is {next((text for test, text in _KINDS if test(mode)), 'a file')}"
        os.scandir(path).close()
    except FileNotFoundError:
        return f"is a link to {os.readlink(path)!r}, which does not exist" if os.path.islink(path) else None
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def unusual_file(directory: Path, names: Sequence[str], most: int = 2**30) -> str | None:
    """The first file of ``directory`` that matches one of ``names`` and cannot be read to an end, as a sentence."""
    for path in sorted(path for name in names for path in directory.glob(name)):
        with suppress(OSError):  # a link to nothing
            state = path.stat()
            if named := next((text for test, text in _KINDS if test(state.st_mode)), None):
                return f"{path} is {named}; write its content to a file of that name."
            if state.st_size > most:
                return f"{path} is larger than {most // 2**20:,} MiB; copy it again."
    return None


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "deleted"


def user_path(path: str | os.PathLike[str], source: str) -> Path:
    """``path`` with the home directory in place of ``~``. ``source``, such as ``data.train=x``, names it in errors.

    Raises:
        ConfigError: it cannot be a path, see :func:`path_problem`.
    """
    if problem := path_problem(path):
        raise ConfigError(f"{shortened(source)} {problem}.")
    return Path(os.path.expanduser(path))


def path_problem(path: str | os.PathLike[str]) -> str | None:
    """Why ``path`` cannot be that of anything, as the end of a sentence; None if it can.

    The system calls would say so with an error, each in its own way, and the first of them is far from the argument.
    """
    text = os.fspath(path)
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        return "has a character that no path can have"
    if b"\0" in encoded:
        return "has a NUL byte, which no path can have"
    if len(encoded) > _LONGEST_PATH or any(len(part) > _LONGEST_NAME for part in encoded.split(b"/")):
        return f"is too long for a path: {_LONGEST_PATH:,} bytes, and {_LONGEST_NAME} between two slashes"
    user = text.partition("/")[0]
    if user.startswith("~") and len(user) > 1 and os.path.expanduser(user) == user:
        return f"is in the home directory of {user[1:]!r}, who is no user of this machine"
    return None
