"""What a sample says about its own use: keys that no rule has read, and marks of answers that are not to be learned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ds_trainer.samples.sources.record import BadRecord

_MOST_NAMES, _LONGEST_NAME = 20, 60
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_TRUTH = {"true": True, "false": False}
_WORDS = {
    **_TRUTH,
    **dict.fromkeys(("1", "good", "desirable", "chosen", "preferred", "accepted", "correct", "thumbs_up"), True),
    **dict.fromkeys(("0", "-1", "bad", "undesirable", "rejected", "dispreferred", "incorrect", "wrong"), False),
    **dict.fromkeys(("thumbs_down", "unacceptable"), False),
}
# Keys that say whether the answer is a good one; of the first ones, and of is_good, a number or a word says it too.
_GRADES = ("kto_tag", "kto_label", "label", "binarized_label")
_GOOD = ("desirable", "preferred", "chosen", "accepted", "good", "correct", "thumbs_up")
_BAD = ("rejected", "undesirable", "bad", "thumbs_down")
_WORSE, _BETTER = ("rejected", "non_preferred"), ("corrected", "revision", "preferred_output")
_MEDIA = ("videos", "video", "audios", "audio")


class ReadKeys(Mapping[str, Any]):
    """A mapping that knows which of its keys were read.

    Attributes:
        inside: names of keys within its values that were not read.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self._read: set[str] = set()
        self.inside: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        value = self._row[key]
        self._read.add(key)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._row

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def peek(self, key: str) -> Any:
        """The value of a key, which does not count as read; None if there is none."""
        return self._row.get(key)

    def unread(self) -> tuple[str, ...]:
        """Names of the keys that have a value and were not read, and of those inside; at most 20."""
        own = {_name(key) for key, value in self._row.items() if key not in self._read and value not in _EMPTY}
        names = sorted(own | self.inside)
        return tuple([*names[:_MOST_NAMES], *(["..."] if len(names) > _MOST_NAMES else [])])


def _name(key: Any) -> str:
    """A key as it can be shown anywhere."""
    text = str(key)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."


def verdict(value: Any, words: Mapping[str, bool] = _TRUTH, numbers: bool = False) -> bool | None:
    """Whether a mark says yes or no; None: it says something else.

    Args:
        value: what the row has under the key.
        words: the texts that say it.
        numbers: whether 1 is yes, and 0 and negative numbers are no.
    """
    if isinstance(value, str):
        return words.get(value.strip().lower())
    if isinstance(value, bool):
        return value
    if numbers and isinstance(value, int | float) and (value == 1 or value <= 0):
        return value == 1
    return None


def check_marks(row: ReadKeys, kind: str, chosen: bool) -> None:
    """Refuse a sample that is not to be trained on, or not as this kind; marks that allow it count as read.

    Args:
        row: the sample.
        kind: the row becomes a record of this kind.
        chosen: whether the recipe names the kind, and so says which of several answers is meant.

    Raises:
        BadRecord: it says that its answer is a bad one, that nothing of it is trained on, or it has what is not read.
    """
    for key in ("train", "training", "trainable", "loss", "loss_mask", "weight", "loss_scale"):
        if isinstance(row.peek(key), list) and row.peek(key):
            raise BadRecord(
                f"has {key!r}, a list of what is trained on; mark turns or parts of them with 'train' instead"
            )
        if _read_verdict(row, key, numbers=key in ("loss_mask", "weight", "loss_scale")) is False:
            raise BadRecord(f"{key!r} is {_shown(row[key])}: nothing of the sample is to be trained on. Leave it out")
    if kind == "text":  # what stands beside a text describes it
        return
    for key in _MEDIA:
        if row.peek(key) not in _EMPTY:
            raise BadRecord(f"has {key!r}, which no task reads: only texts and images are. Leave such samples out")
    boxes = row.peek("objects")
    if isinstance(boxes, Mapping) and {"bbox", "ref"} & boxes.keys():
        raise BadRecord("has 'objects', boxes that are not put into the text. Write them there in the model's own form")
    if kind != "preference":
        refuse_bad_answer(row)
        _refuse_other_answers(row, chosen)


def refuse_bad_answer(row: ReadKeys, place: str = "") -> None:
    """Raise BadRecord if the sample, or the turn at ``place``, is marked as a bad answer."""
    for key in (*_GRADES, *_GOOD, *_BAD):
        for name in (key, f"is_{key}"):
            graded = key in _GRADES or name != key  # "chosen" alone may be a number of an answer
            says = _read_verdict(row, name, _WORDS, True) if graded else _read_verdict(row, name)
            if says is not None and says is (key in _BAD):
                raise BadRecord(
                    f"{place}{name!r} is {_shown(row[name])}, which marks the answer as a bad one; this job would "
                    "train on it as a good one. Leave such samples out, or pair them with good answers (chosen, "
                    f"rejected) for task dpo; if {name!r} is no such mark, rename it"
                )


def _refuse_other_answers(row: ReadKeys, chosen: bool) -> None:
    if chosen:
        return
    for key, value in ((key, row.peek(key)) for key in row if isinstance(key, str)):
        if value in _EMPTY or not isinstance(value, str | list | Mapping) or verdict(value) is not None:
            continue
        if key.startswith(_WORSE) or key in _BETTER:
            other = "a worse" if key.startswith(_WORSE) else "a better"
            raise BadRecord(
                f"has {key!r}, {other} answer than the one that this job would train on. Take task dpo, which trains "
                "on pairs (chosen, rejected); or remove the key, or set kind of the source to messages or "
                "prompt_completion, to train on the other answer alone"
            )


def _read_verdict(row: ReadKeys, key: str, words: Mapping[str, bool] = _TRUTH, numbers: bool = False) -> bool | None:
    says = verdict(row.peek(key), words, numbers)
    if says is not None:
        row[key]  # a mark that was understood was read
    return says


def _shown(value: Any) -> str:
    return json.dumps(value, default=repr)
