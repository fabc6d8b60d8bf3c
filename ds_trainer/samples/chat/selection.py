"""Which messages are trained on, and the characters of the text that this means."""

from __future__ import annotations

from itertools import pairwise

from ds_trainer.samples.chat.messages import Conversation
from ds_trainer.samples.chat.rendering import Renderer
from ds_trainer.samples.chat.turns import TextSpan, Turns


def selected_messages(conversation: Conversation, train_on: str | tuple[str, ...], first: int = 0) -> list[int]:
    """Indices of the messages that are trained on.

    Args:
        conversation: the messages; their key ``train`` overrides the rest.
        train_on: the option of :class:`ds_trainer.samples.chat.options.EncodeOptions`.
        first: messages before it belong to the prompt.
    """
    roles = [message["role"] for message in conversation.messages]
    assistant = [index for index, role in enumerate(roles) if role == "assistant"]
    if train_on == "last_turn":
        questions = [
            index for index, role in enumerate(roles) if role == "user" and assistant and index < assistant[-1]
        ]
        chosen = {index for index in assistant if index > max(questions, default=-1)}
    elif train_on == "all":
        chosen = set(range(len(roles)))
    else:
        chosen = {index for index, role in enumerate(roles) if role in train_on or role == train_on}
    return [
        index
        for index in range(len(roles))
        if (choice := conversation.train[index]) or (choice is None and index in chosen and index >= first)
    ]


def trained_spans(
    renderer: Renderer, turns: Turns, conversation: Conversation, selected: list[int], everything: bool
) -> tuple[list[TextSpan] | str, set[str]]:
    """The characters of ``turns.text`` that are trained on, and what was noticed.

    A template with ``{% generation %}`` blocks says itself what the model generates; where the turns can also be found
    by comparing texts, a generation prompt within a block is removed and an end-of-turn token behind it is added.

    Returns:
        Spans in ascending order without overlap, or the reason why they cannot be known.
    """
    messages, text = conversation.messages, turns.text
    if everything:
        excluded = [index for index in range(len(messages)) if index not in selected]
        return _without(turns, messages, excluded), set()
    notices: set[str] = set()
    marked = renderer.render_marked(messages, conversation.tools).marked if renderer.markers else []
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    spans: list[TextSpan] = []
    for index in selected:
        if messages[index]["role"] == "assistant":
            turn = turns.generated(index)
            if renderer.markers:
                parts = _marked(marked, turn, assistants.index(index), len(assistants), turns, notices)
            else:
                parts = None if turn is None else [turn]
        else:
            written = turns.written(index)
            parts = None if written is None else [written]
        if parts is None:
            return _not_found(index, len(messages), messages[index]["role"]), notices
        spans += [span for span in parts if span.end > span.start]
    if any(after.start < before.end for before, after in pairwise(spans)):
        return (f"the turns of the conversation overlap in the text of the template: {text[:80]!r}", notices)
    return spans, notices


def without_parts(
    turns: Turns, conversation: Conversation, selected: list[int], spans: list[TextSpan]
) -> list[TextSpan] | str:
    """``spans`` without the parts of selected messages that are not trained on, or why they cannot be known."""
    for index in selected:
        for part in conversation.untrained[index]:
            left_out = turns.part(index, part)
            if left_out is None:
                return _not_found(index, len(conversation.messages), f'a part with "train": false of {part.key}')
            pairs = [(TextSpan(a, min(b, left_out.start)), TextSpan(max(a, left_out.end), b)) for a, b in spans]
            spans = [piece for pair in pairs for piece in pair if piece.end > piece.start]
    return spans


def _marked(
    marked: list[tuple[int, int]], turn: TextSpan | None, order: int, count: int, turns: Turns, notices: set[str]
) -> list[TextSpan] | None:
    """The blocks of one turn; ``turn`` is the turn as it was found by comparing texts, or None."""
    if turn is None:
        return [TextSpan(*marked[order])] if len(marked) == count else None
    blocks = [TextSpan(start, end) for start, end in marked if start < turn.end and end > turn.start]
    if blocks and blocks[0].start < turn.start:
        notices.add("prompt_in_markers")
        blocks[0] = TextSpan(turn.start, blocks[0].end)
    if blocks and blocks[-1].end < turn.end and turns.is_end_of_turn(blocks[-1].end, turn.end):
        notices.add("end_of_turn_not_in_markers")
        blocks[-1] = TextSpan(blocks[-1].start, turn.end)
    return blocks


def _without(turns: Turns, messages: list[dict[str, object]], excluded: list[int]) -> list[TextSpan] | str:
    """The whole text except for the messages ``excluded``."""
    spans, position = [], 0
    for index in excluded:
        span = turns.generated(index) if messages[index]["role"] == "assistant" else turns.written(index)
        if span is None:
            return _not_found(index, len(messages), str(messages[index]["role"]))
        if span.start > position:
            spans.append(TextSpan(position, span.start))
        position = max(position, span.end)
    if position < len(turns.text):
        spans.append(TextSpan(position, len(turns.text)))
    return spans


def _not_found(index: int, count: int, role: str) -> str:
    return (
        f"message {index + 1} of {count} ({role}) cannot be found with certainty in the text of the "
        "chat template. Use one that marks what the assistant generates, with {% generation %}, or exclude it with "
        '"train": false.'
    )
