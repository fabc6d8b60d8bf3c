"""``ds-trainer chat``: answers from a trained model in the terminal, or one answer for a script."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ds_trainer.cli.argv import add_dtype
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.recipes.chat_session import ChatSession

HELP = "talk to a trained model"
DESCRIPTION = """Answers from a trained model: a directory with full weights or adapters, the output directory of a
run (then its newest checkpoint), or a Hub name. A model with a chat template holds a conversation; one without
continues your text. Without a terminal the standard input is one prompt, and only the answer is printed."""

_HELP = """/reset          begin a new conversation
/system TEXT    begin a new conversation with this system message; without TEXT: without one
/image PATH     show the model this image with your next text; several are shown in their order
/exit           end (also Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ continues on the next one; \"\"\" begins and ends a text of several
lines."""
_QUOTES = '"""'


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of the subcommand."""
    add = parser.add_argument
    add("model", metavar="DIR", help="directory or Hub name of the model, or the output directory of a run")
    add("--prompt", metavar="TEXT", help="print the answer to TEXT and end (-: read it from the standard input)")
    add("--image", metavar="PATH", action="append", default=[], help="image before the prompt; may be repeated")
    add("--system", metavar="TEXT", help="system message")
    add("--temperature", type=float, metavar="T", help="0: the most likely token; default: the model's setting, or 0.7")
    add("--max-new-tokens", type=int, default=512, metavar="N", help="most tokens of an answer; default: 512")
    add("--seed", type=int, metavar="N", help="of the random numbers of every answer")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N; default: auto")
    add_dtype(parser, "that of the files")
    add("--base", metavar="DIR", help="for adapters whose base model has moved: where it is")


def run(options: argparse.Namespace, args: Sequence[str]) -> int:
    """Talk; returns the exit code.

    Raises:
        ConfigError: an option is wrong, or there is no model that can be used.
    """
    problems = []
    if args:
        problems.append(f"ds-trainer chat: unrecognized arguments: {' '.join(args)}.")
    if options.temperature is not None and not 0 <= options.temperature < float("inf"):
        problems.append(f"--temperature {options.temperature}: must be 0 or more.")
    if options.max_new_tokens < 1:
        problems.append(f"--max-new-tokens {options.max_new_tokens}: must be 1 or more.")
    if options.prompt is not None and not options.prompt.strip():
        problems.append("--prompt is empty; give a text.")
    if problems:
        raise ConfigError(problems)
    from ds_trainer.recipes.saved_model import find_saved_model  # imports torch, which takes seconds

    saved = find_saved_model(options.model, options.base)
    if saved.note:
        print(saved.note, file=sys.stderr)
    from ds_trainer.recipes.chat_session import GenerationOptions, load_session

    drawing = GenerationOptions(options.max_new_tokens, options.temperature, options.seed)
    prompt = options.prompt
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        try:
            prompt = sys.stdin.read().strip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"The standard input is not {error.encoding} text (byte {error.start}).") from None
        if not prompt:
            raise ConfigError(
                "The standard input has no text. Give a prompt with --prompt TEXT, or write it to a pipe."
            )
    warnings.simplefilter("ignore", FutureWarning)  # of libraries, between the answers
    session = load_session(saved, drawing, options.device, options.dtype)
    if options.system is not None:
        session.set_system(options.system)
    for path in options.image:
        session.attach(path)
    if prompt is None:
        _talk(session)
        return 0
    session.ask(prompt, _write)
    _write("\n")
    return 0


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _talk(session: ChatSession) -> None:
    """Read prompts from the terminal until it ends."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() then has a history and can be edited)
    print("/help lists the commands." if session.has_template else "No chat template: your text is continued. /help")
    while True:
        try:
            text = read_prompt()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/exit ends.")
            continue
        if not text.strip():
            continue
        try:
            if text.startswith("/"):
                if not command(session, text.strip()):
                    return
                continue
            answer = session.ask(text, _write)
            ends = {"length": " [cut: --max-new-tokens]", "interrupted": " [stopped]"}
            _write(f"{ends.get(answer.end, '')}\n")
        except ConfigError as error:
            print(error)


def read_prompt() -> str:
    """One prompt of one or several lines.

    Raises:
        EOFError: the input has ended.
    """
    line = input(">>> ")
    if line.startswith(_QUOTES):
        lines = [line.removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(input("... "))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("... "))
    return "\n".join(lines)


def command(session: ChatSession, text: str) -> bool:
    """Run the command ``text``; False if it ends the conversation.

    Raises:
        ConfigError: there is no such command, or it is impossible here.
    """
    name, _, rest = text.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/help":
        print(_HELP)
    elif name == "/reset":
        session.reset()
        print("New conversation.")
    elif name == "/system":
        session.set_system(rest.strip())
        print("New conversation with this system message." if rest.strip() else "No system message.")
    elif name == "/image":
        if not rest.strip():
            raise ConfigError("/image needs the path of an image.")
        session.attach(rest.strip())
        print("The image is shown with your next text.")
    else:
        raise ConfigError(f"{name} is not a command; /help lists them.")
    return True
