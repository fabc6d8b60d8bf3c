"""``ds-trainer chat``: one answer for a script, a conversation in a terminal, and errors in words."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from ds_trainer.cli import chat
from ds_trainer.cli.main import main
from ds_trainer.recipes.chat_session import ChatSession, GenerationOptions, load_session
from ds_trainer.recipes.saved_model import find_saved_model
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE
from tests.support.chat_model import save_adapters, save_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat") / "model")


def expected(model: Path, prompt: str, system: str | None = None) -> str:
    session = load_session(find_saved_model(str(model)), GenerationOptions(8, 0.0), "cpu")
    if system is not None:
        session.set_system(system)
    return session.ask(prompt, lambda piece: None).text


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_one_answer(model: Path, system: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "0", "--max-new-tokens", "8", *(["--system", system] if system else [])]
    assert main(["chat", str(model), "--prompt", "Hello", *options]) == DONE
    assert capsys.readouterr().out == expected(model, "Hello", system) + "\n"


def test_a_pipe_is_one_prompt(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert main(["chat", str(model), "--temperature", "0", "--max-new-tokens", "8"]) == DONE
    assert capsys.readouterr().out == expected(model, "two\nlines") + "\n"


def test_an_empty_pipe_is_an_error(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", str(model)]) == CANNOT_WORK
    assert "--prompt TEXT" in capsys.readouterr().err


def test_adapters_answer_with_their_base(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapters = save_adapters(tmp_path / "lora", model)
    options = ["--prompt", "Hello", "--temperature", "0", "--max-new-tokens", "8"]
    assert main(["chat", str(adapters), *options]) == DONE
    said = capsys.readouterr().out
    assert said == expected(adapters, "Hello") + "\n" != expected(model, "Hello") + "\n"
    assert main(["checkpoint", "merge", str(adapters), "--to", str(tmp_path / "merged")]) == DONE
    capsys.readouterr()
    assert main(["chat", str(tmp_path / "merged"), *options]) == DONE
    assert capsys.readouterr().out == said


def test_all_wrong_options_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--temperature", "-1", "--max-new-tokens", "0", "--prompt", " ", "--tempo", "3"]
    assert main(["chat", str(tmp_path / "nowhere"), *wrong]) == CANNOT_WORK
    message = capsys.readouterr().err
    for part in ("--temperature -1", "--max-new-tokens 0", "--prompt is empty", "--tempo"):
        assert part in message
    assert main(["chat", str(tmp_path / "nowhere"), "--prompt", "x"]) == CANNOT_WORK
    assert "nowhere' is not a directory" in capsys.readouterr().err


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Lines of a terminal, which then ends."""
    rest = list(lines)

    def read(prompt: str = "") -> str:
        if not rest:
            raise EOFError
        return rest.pop(0)

    monkeypatch.setattr("builtins.input", read)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_conversation(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, int]] = []
    original = ChatSession.ask

    def ask(self: ChatSession, text: str, write: object) -> object:
        asked.append((text, self._system, len(self._turns)))
        return original(self, text, write)  # type: ignore[arg-type]

    monkeypatch.setattr(ChatSession, "ask", ask)
    monkeypatch.setattr(sys, "stdin", Terminal())
    typed(
        monkeypatch,
        *("Hello", "And\\", "then?", "/reset", "", '"""one', "", 'two"""', "/system Be brief.", "Hi", "/system"),
        *("Hi", "/nonsense", "/help", "x" * 300, "/exit", "never read"),
    )
    assert main(["chat", str(model), "--temperature", "0", "--max-new-tokens", "4"]) == DONE
    brief, long = "Be brief.", "x" * 300
    turns = [("Hello", None, 0), ("And\nthen?", None, 2), ("one\n\ntwo", None, 0), ("Hi", brief, 0), ("Hi", None, 0)]
    assert asked == [*turns, (long, None, 2)]
    output = capsys.readouterr().out
    assert "/nonsense is not a command" in output
    assert "Ctrl-C stops an answer" in output
    assert "256 positions" in output  # the conversation that is too long; it goes on after that


def test_the_end_of_the_input_ends_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, '"""never closed')
    with pytest.raises(EOFError):
        chat.read_prompt()
