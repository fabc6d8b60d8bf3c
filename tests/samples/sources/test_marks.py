"""Keys that no rule reads are named; answers marked as bad ones, and parts that are not to be learned, are left out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.samples.sources.record import BadLines, Record
from ds_trainer.samples.sources.source import Source
from ds_trainer.samples.sources.spec import SourceSpec

ASK, SAY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHAT = {"messages": [ASK, SAY]}
ALPACA = {"instruction": "a", "output": "b"}
PAIR = {"prompt": "a", "completion": "b"}


def read(tmp_path: Path, *rows: Any, **spec: Any) -> tuple[list[Record], list[str]]:
    """The records of a file with ``rows``, and what is said of its bad lines."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bad = BadLines()
    records = list(Source(SourceSpec(path=(str(path),), **spec), "data.train").read(bad))
    return records, [problem.removeprefix(f"{path}:") for problem in bad.problems()]


@pytest.mark.parametrize("sample", [CHAT, ALPACA, PAIR], ids=["messages", "alpaca", "pair"])
@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ({"kto_tag": False}, "'kto_tag' is false, which marks the answer as a bad one"),
        ({"kto_tag": "false"}, "'kto_tag' is \"false\", which marks"),
        ({"label": False}, "'label' is false, which marks"),
        ({"label": 0}, "'label' is 0, which marks"),
        ({"label": -1}, "'label' is -1, which marks"),
        ({"label": "False"}, "'label' is \"False\", which marks"),
        ({"label": " Undesirable"}, "'label' is \" Undesirable\", which marks"),
        ({"label": 0.0}, "'label' is 0.0, which marks"),
        ({"label": "0"}, "'label' is \"0\", which marks"),
        ({"label": "wrong"}, "'label' is \"wrong\", which marks"),
        ({"kto_label": 0}, "'kto_label' is 0, which marks"),
        ({"is_preferred": 0}, "'is_preferred' is 0, which marks"),
        ({"is_correct": "0"}, "'is_correct' is \"0\", which marks"),
        ({"is_desirable": False}, "'is_desirable' is false, which marks"),
        ({"chosen": False}, "'chosen' is false, which marks"),
        ({"rejected": True}, "'rejected' is true, which marks"),
        ({"thumbs_down": "true"}, "'thumbs_down' is \"true\", which marks"),
        ({"rejected_messages": [SAY]}, "has 'rejected_messages', a worse answer than the one"),
        ({"rejected": "c"}, "has 'rejected', a worse answer"),
        ({"non_preferred_output": [SAY]}, "has 'non_preferred_output', a worse answer"),
        ({"corrected": "c"}, "has 'corrected', a better answer"),
        ({"train": False}, "'train' is false: nothing of the sample is to be trained on"),
        ({"weight": 0}, "'weight' is 0: nothing of the sample"),
        ({"loss_mask": 0}, "'loss_mask' is 0: nothing of the sample"),
        ({"loss_mask": [0, 1]}, "has 'loss_mask', a list of what is trained on; mark turns"),
        ({"loss_scale": 0.0}, "'loss_scale' is 0.0: nothing of the sample"),
        ({"videos": ["a.mp4"]}, "has 'videos', which no task reads"),
        ({"objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}}, "has 'objects', boxes that"),
    ],
)
def test_marked_samples_are_refused_by_name(tmp_path: Path, sample: Any, mark: Any, says: str) -> None:
    # The first sample says nothing: the format is found, and each line is looked at.
    records, problems = read(tmp_path, sample, {**sample, **mark})
    assert len(records) == len(problems) == 1
    assert problems[0].startswith(f"2: {says}")


def test_a_turn_that_is_marked_as_a_bad_answer_is_refused_or_not_trained_on(tmp_path: Path) -> None:
    question, answer = CHAT["messages"][0], CHAT["messages"][-1]
    bad = {**answer, "content": "c", "label": False}
    rejected = {"prompt": [question], "chosen": [answer], "rejected": [bad]}
    trained = {"messages": [{**question, "label": 0}, {**bad, "train": False}, question, answer]}
    assert read(tmp_path, trained)[1] == read(tmp_path, rejected)[1] == []
    (problem,) = read(tmp_path, CHAT, {"messages": [question, answer, question, bad]})[1]
    assert problem.startswith("2: turn 4 of 'messages': 'label' is false, which marks")


@pytest.mark.parametrize(
    "mark",
    [{"kto_tag": True}, {"label": 1}, {"label": "true"}, {"is_good": True}, {"rejected": False}, {"weight": 1.0}],
)
def test_marks_of_good_answers_are_read(tmp_path: Path, mark: Any) -> None:
    (record,), problems = read(tmp_path, {**ALPACA, **mark})
    assert record.unread == () and not problems


@pytest.mark.parametrize("key", [{"label": 3}, {"label": "news"}, {"weight": 0.5}, {"correct": 0}, {"rejected_by": 2}])
def test_what_is_no_mark_is_named(tmp_path: Path, key: Any) -> None:
    (record,), problems = read(tmp_path, {**ALPACA, **key})
    assert record.unread == tuple(key) and not problems


def test_a_kind_says_which_answer_is_meant(tmp_path: Path) -> None:
    row = {**CHAT, "rejected_response": "c"}
    (record,), _ = read(tmp_path, row)
    assert record == (
        record.source,
        "preference",
        {"prompt": [ASK], "chosen": [SAY], "rejected": [record.fields["rejected"][0]]},
        (),
    )
    (record,), _ = read(tmp_path, row, kind="messages")
    assert (record.kind, record.unread) == ("messages", ("rejected_response",))
    assert read(tmp_path, {**row, "label": False}, kind="messages")[1]  # but not that a bad answer is a good one


def test_the_keys_that_no_rule_reads_are_named(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "s", "id": 1},
        {**ASK, "loss": True, "weight": None},
        {**SAY, "content": [{"type": "text", "text": "b", "cache": {"a": 1}}], "tokens": 7, "empty": []},
    ]
    row = {"messages": turns, "system": "another", "tools": [], "source": "web", "\x1b[2J": 1, "null": None, "": "x"}
    (record,), problems = read(tmp_path, row)
    assert not problems
    named = {"messages[].content[].cache", "messages[].id", "messages[].loss", "messages[].tokens", "source", "system"}
    assert set(record.unread) == named | {"'\\x1b[2J'", ""}
    (record,), _ = read(
        tmp_path, {**ALPACA, **{f"k{number:03}": 1 for number in range(90)}, "input": "", "history": []}
    )
    assert record.unread == (*(f"k{number:03}" for number in range(20)), "...")


def test_random_further_keys_are_named(tmp_path: Path) -> None:
    """A key that is added anywhere is read, named, or refused: nothing is left out in silence."""
    draw = random.Random(1)
    for _ in range(150):
        row = json.loads(json.dumps(draw.choice([CHAT, ALPACA, PAIR, {"text": "a"}])))
        place = draw.choice([row, *row.get("messages", ())])
        key = draw.choice(
            ["x", "notes", "train_detail", "score", "kto_tag", "loss", "context", "article", "reflection"]
        )
        place[key] = draw.choice([True, False, 3, "word", [1], {"a": 1}])
        (tmp_path / "x.jsonl").unlink(missing_ok=True)
        records, problems = read(tmp_path, row)
        read_right = key in ("loss", "train", "kto_tag", "context", "article") or problems
        assert read_right or any(name.rpartition(".")[2] == key for name in records[0].unread), row


def test_turns_that_are_not_to_be_trained_on(tmp_path: Path) -> None:
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    turns = [{"from": "human", "value": "a"}, {**call, "train": False}, call, {"from": "observation", "value": "c"}]
    turns += [{"from": "gpt", "value": "d", "loss": False}, {"from": "gpt", "value": "e", "train": True, "weight": 0}]
    turns += [
        {"from": "gpt", "value": "f", "ignore": False} | {key: value}
        for key in ("training", "trainable", "loss_mask")
        for value in (False, 1)
    ]
    (record,), problems = read(tmp_path, {"conversations": turns})
    assert not problems and not record.unread
    messages = record.fields["messages"]
    assert [len(turn.get("tool_calls", ())) for turn in messages] == [0, 2, *[0] * 9]  # two calls of one turn
    assert [turn.get("train") for turn in messages] == [None, False, None, False, False, *[False, True] * 3]


def test_parts_that_are_not_to_be_trained_on(tmp_path: Path) -> None:
    details = [
        {"begin_offset": 0, "end_offset": 1, "train": False},
        {"begin_offset": 3, "end_offset": 4, "train": True},
    ]
    (record,), problems = read(tmp_path, {"messages": [ASK, {**SAY, "content": "abcdefg", "train_detail": details}]})
    assert not problems and not record.unread
    assert record.fields["messages"][1] == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "abc", "train": False},
            {"type": "text", "text": "de", "train": True},
            {"type": "text", "text": "fg", "train": False},
        ],
        "train": True,
    }
    for wrong in (
        [{"begin_offset": 0.5, "end_offset": 2, "train": True}],
        5,
        [{}],
        [{"begin_offset": 0, "end_offset": 7, "train": True}],
        [{"begin_offset": 0, "end_offset": 2}],
    ):
        _, problems = read(tmp_path, CHAT, {"messages": [ASK, {**SAY, "content": "abcdefg", "train_detail": wrong}]})
        assert (
            "'train_detail' must have entries with begin_offset and end_offset (0 to 6, both included)" in problems[0]
        )


def test_pairs_are_trained_on_whole(tmp_path: Path) -> None:
    row = {"prompt": [{**ASK, "train": False}], "chosen": [SAY], "rejected": [{**SAY, "content": "c"}]}
    (record,), _ = read(tmp_path, row)
    assert record.fields["prompt"] == [ASK]
    row["chosen"] = [{**SAY, "weight": 0}]
    assert "a turn of 'chosen' is marked as not to be trained on" in read(tmp_path, row)[1][0]


@pytest.mark.parametrize(
    "rejected", ["c", {**SAY, "content": "c"}, [{**SAY, "content": "c"}], [ASK, {**SAY, "content": "c"}]]
)
def test_an_answer_beside_a_conversation_makes_a_pair(tmp_path: Path, rejected: Any) -> None:
    """A text, a turn, several turns, or the whole conversation with another end."""
    key = "rejected_messages" if isinstance(rejected, list) else "rejected_response"
    (record,), problems = read(tmp_path, {**CHAT, "system": "s", key: rejected})
    assert not problems and record.kind == "preference" and not record.unread
    assert record.fields == {
        "prompt": [{"role": "system", "content": "s"}, ASK],
        "chosen": [SAY],
        "rejected": [{**SAY, "content": "c"}],
    }
    _, problems = read(tmp_path, {**CHAT, key: [SAY]})
    assert f"{key!r} must be another answer to the last question of 'messages'" in problems[0]


TOLD, OTHER, MORE = {"role": "system", "content": "s"}, {**SAY, "content": "c"}, {"role": "user", "content": "d"}


@pytest.mark.parametrize(
    ("beside", "before", "prompt", "begins"),
    [
        ({"prompt": " a\n"}, [ASK], None, [ASK]),  # of the conversation: it was there twice
        ({"question": "a"}, [ASK], None, [ASK]),
        ({"prompt": [ASK]}, [ASK], None, [ASK]),
        ({"prompt": [TOLD, ASK]}, [ASK], None, [TOLD, ASK]),
        ({"prompt": [ASK]}, [TOLD, ASK], None, [TOLD, ASK]),
        ({"prompt": "a", "system": "s"}, [ASK], None, [TOLD, ASK]),
        ({"prompt": "a"}, [ASK, SAY, MORE], None, [ASK, SAY, MORE]),
        ({"prompt": [ASK, SAY]}, [MORE], [ASK, SAY], [MORE]),  # which the conversation goes on with
        ({"prompt": [ASK], "system": "s"}, [], [TOLD, ASK], []),
        ({"system": "s"}, [ASK], None, [TOLD, ASK]),
        ({"prompt": "d"}, [ASK], "refused", []),
        ({"prompt": [MORE]}, [ASK], "refused", []),
        ({"prompt": [{**TOLD, "content": "t"}, ASK]}, [TOLD, ASK], "refused", []),
    ],
)
def test_a_prompt_is_read_once(tmp_path: Path, beside: Any, before: Any, prompt: Any, begins: Any) -> None:
    """Whole conversations have it already, but for its system turn."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {**beside, "chosen": [*before, SAY], "rejected": [*before, OTHER], "tools": tools}
    records, problems = read(tmp_path, row)
    if prompt == "refused":
        assert "'chosen' is a whole conversation, which does not begin with 'prompt'" in problems[0]
    else:
        (record,), wanted = records, {"chosen": [*begins, SAY], "rejected": [*begins, OTHER], "tools": tools}
        assert record.fields == (wanted if prompt is None else {**wanted, "prompt": prompt}) and not record.unread
