"""One sample of a source as it was read, before tokenization."""

from __future__ import annotations

from typing import Any, NamedTuple


class Record(NamedTuple):
    """A sample in one of the standard dataset formats of TRL.

    Attributes:
        source: where it was read: ``file:line``, or ``file, row N``.
        kind: ``text``, ``messages``, ``prompt_completion`` or ``preference``.
        fields: ``text`` has ``{"text": str}``; ``messages`` has ``{"messages": [{"role", "content", ...}]}`` and
            optionally ``"tools"``; ``prompt_completion`` has ``"prompt"`` and ``"completion"`` (text or messages);
            ``preference`` has ``"chosen"``, ``"rejected"`` and optionally ``"prompt"``. Any kind may have ``"images"``.
            A message with ``train`` false is not trained on, nor is a text part with it; a text with ``"spans"`` is
            trained on in these characters (pairs, the second one exclusive) alone.
        unread: keys of the sample that no rule has read, as ``id`` or ``messages[].id``.
    """

    source: str
    kind: str
    fields: dict[str, Any]
    unread: tuple[str, ...] = ()
