"""Records of datasets become rollouts to be generated, and nothing of them is lost."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf import RolloutState, Status
from replaybuf.errors import RolloutError
from replaybuf.produce.prompt_records import to_rollout

USER = {"role": "user", "content": "7+5="}
SYSTEM = {"role": "system", "content": "Add."}
ANSWER = {"role": "assistant", "content": "12"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add"}}]}
TOOL = {"role": "tool", "content": "12", "tool_call_id": "1"}


TOOLS = [{"type": "function", "function": {"name": "add"}}]
#: Records, and the fields of their rollouts.
RECORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a text": ({"prompt": "7+5="}, {"message": [USER]}),
    "verl and xtuner": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [SYSTEM, USER],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "12"},
            "extra_info": {"split": "train", "index": 3},
        },
        {
            "data_source": "openai/gsm8k",
            "message": [SYSTEM, USER],
            "reward_model": {"style": "rule", "ground_truth": "12"},
            "extra_fields": {"ability": "math", "extra_info": {"split": "train", "index": 3}},
        },
    ),
    "OpenAI, with an answer to compare with": (
        {"messages": [SYSTEM, USER, ANSWER], "tools": TOOLS, "parallel_tool_calls": False},
        {
            "message": [SYSTEM, USER],
            "tools": TOOLS,
            "reward_model": {"ground_truth": "12"},
            "extra_fields": {"parallel_tool_calls": False},
        },
    ),
    "messages before a prompt, which is kept": (
        {"message": None, "messages": [USER], "prompt": "7+5="},
        {"message": [USER], "extra_fields": {"prompt": "7+5="}},
    ),
    "None in a column of other records": (
        {"messages": None, "prompt": "7+5="},
        {"message": [USER], "extra_fields": {"messages": None}},
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_becomes_a_rollout(name: str) -> None:
    record, expected = RECORDS[name]
    rollout = to_rollout(record)
    assert {name: getattr(rollout, name) for name in rollout.model_fields_set} == expected


@pytest.mark.parametrize(
    ("messages", "prompt", "truth"),
    [
        ([USER], [USER], None),
        ([USER, ANSWER, USER], [USER, ANSWER, USER], None),
        ([USER, CALL, TOOL, ANSWER], [USER, CALL, TOOL], "12"),
        ([USER, CALL], [USER], [CALL]),
        ([USER, ANSWER, ANSWER], [USER], [ANSWER, ANSWER]),
    ],
    ids=["none", "earlier", "after a tool", "a call", "two"],
)
def test_the_reference_answer_is_of_turns_at_the_end(messages: list[Any], prompt: list[Any], truth: Any) -> None:
    rollout = to_rollout({"messages": messages})
    assert rollout.message == prompt
    assert rollout.reward_model == (None if truth is None else {"ground_truth": truth})


TRUE = {"style": "rule", "ground_truth": "12"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({**TRUE, "ground_truth": "12!"}, {**TRUE, "ground_truth": "12!"}),
        ("judge", "judge"),
        ({"style": "rule"}, TRUE),
        ({**TRUE, "ground_truth": None}, TRUE),
    ],
)
def test_a_given_ground_truth_stays_and_a_missing_one_is_the_answer(given: Any, kept: Any) -> None:
    rollout = to_rollout({"messages": [USER, ANSWER], "reward_model": given})
    assert (rollout.reward_model, rollout.extra_fields) == (kept, {})


def test_the_fields_of_a_rollout_are_taken_as_they_are() -> None:
    """Also what was generated; assistant turns stay, and others go to the extra fields that are there."""
    record = {
        "message": [USER, ANSWER],
        "rollout_id": 3,
        "response": "12",
        "response_ids": [1, 2],
        "status": "completed",
        "reward": 1.0,
        "extra_fields": {"a": 1},
        "ability": "math",
    }
    rollout = to_rollout(record)
    assert (rollout.message, rollout.rollout_id, rollout.uid) == ([USER, ANSWER], 3, 3)
    assert (rollout.response, rollout.response_ids, rollout.reward) == ("12", [1, 2], 1.0)
    assert (rollout.status, rollout.extra_fields) == (Status.COMPLETED, {"a": 1, "ability": "math"})


@pytest.mark.parametrize("name", ["response", "reward", "status", "labels", "tokens", "finish_reason", "logprobs"])
@pytest.mark.parametrize("record", [{"prompt": "7+5="}, {"messages": [USER]}])
def test_answers_in_a_dataset_are_not_taken_for_what_was_generated(name: str, record: dict[str, Any]) -> None:
    """A rollout that has them would not be generated, or be continued from there."""
    rollout = to_rollout(record | {name: "12"})
    assert rollout.extra_fields == {name: "12"}
    assert getattr(rollout, name) == getattr(RolloutState(message=[USER]), name)


def test_a_rollout_is_copied() -> None:
    rollout = RolloutState(message=[copy.deepcopy(USER)], extra_fields={"a": [1]}, reward=2.0)
    copied = to_rollout(rollout)
    assert copied == rollout
    copied.message[0]["content"] = "8+5="
    copied.extra_fields["a"].append(2)
    assert (rollout.message, rollout.extra_fields) == ([USER], {"a": [1]})


@pytest.mark.parametrize("name", ["message", "messages", "prompt"])
def test_a_rollout_shares_nothing_with_the_record(name: str) -> None:
    record = {name: [SYSTEM, USER], "extra_info": {"list": [1]}, "tools": [{"a": 1}], "sample_params": {"n": 1}}
    before = copy.deepcopy(record)
    rollout = to_rollout(record)
    rollout.message[1]["content"] = "?"
    rollout.extra_fields["extra_info"]["list"].append(2)
    rollout.tools[0]["a"] = rollout.sample_params["n"] = 2
    assert record == before


@pytest.mark.parametrize("name", ["message", "messages", "prompt"])
def test_parts_of_a_message_and_roles_of_any_kind_pass(name: str) -> None:
    image = np.zeros((2, 2), np.uint8)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "developer", "content": "Look."}, {"role": "user", "content": parts, "name": "Ann"}]
    rollout = to_rollout({name: messages})
    assert rollout.message == messages
    assert rollout.message[1]["content"][0]["image"] is image


def test_what_readers_of_tables_give_becomes_lists_and_dicts() -> None:
    """Arrays of objects, tuples, mappings and scalars of numpy; arrays of numbers stay."""
    content = np.array([{"type": "text", "text": np.str_("7+5=")}, UserDict(type="text", text="?")], dtype=object)
    record = UserDict(
        prompt=np.array([{"role": "user", "content": content}], dtype=object),
        reward_model={"ground_truth": np.array(["12", "twelve"])},
        tools=({"type": "function"},),
        extra_info={"index": np.int64(3), "zero": np.array(4), "scores": np.array([0.5, 1.0])},
        data_source=None,
    )
    rollout = to_rollout(record)
    [message] = rollout.message
    assert message == {
        "role": "user",
        "content": [{"type": "text", "text": "7+5="}, {"type": "text", "text": "?"}],
    }
    assert type(message["content"][0]["text"]) is str
    assert type(message["content"][1]) is dict
    assert rollout.reward_model == {"ground_truth": ["12", "twelve"]}
    assert rollout.tools == [{"type": "function"}]
    extra = rollout.extra_fields["extra_info"]
    assert [type(extra["index"]), type(extra["zero"]), extra["scores"].dtype] == [int, int, np.float64]


values = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
names = st.text(min_size=1, max_size=8).filter(
    lambda name: name not in {*RolloutState.model_fields, "messages", "prompt"}
)


@settings(max_examples=30)
@given(extra=st.dictionaries(names, values), name=st.sampled_from(["message", "messages", "prompt"]))
def test_no_field_is_lost(extra: dict[str, Any], name: str) -> None:
    assert to_rollout({name: [USER], **extra}).extra_fields == extra


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("7+5=", r"expected a record of a prompt, got str: '7\+5='; understood are"),
        ([USER], "got list: "),
        ({}, "no prompt, only no fields: understood are"),
        ({"question": "7+5=", "answer": "12"}, "no prompt, only 'question', 'answer': understood are"),
        ({"prompt": 12}, r"prompt must be a list of messages, such as .*, got int: 12"),
        ({"prompt": []}, r"prompt must be a list of messages, such as .*, got list: \[\]"),
        ({"messages": "7+5="}, r"messages must be .*, got str: '7\+5='"),
        ({"messages": [USER, "12"]}, r"messages\[1\] is '12': a message is a dict with a \"role\""),
        ({"messages": [{"content": "7+5="}]}, r"messages\[0\]"),
        ({"message": [{"role": 1, "content": "7+5="}]}, r"message\[0\]"),
        ({"message": USER}, "message must be .*, got dict"),
        ({"messages": [ANSWER]}, "all of them are the assistant's"),
        ({"message": [USER], "status": "solved"}, "can't be a rollout: status"),
        ({"message": [USER], "uid": 1, "rollout_id": 2}, "uid is the old name"),
        ({"prompt": "7+5=", "extra_fields": 1}, "extra_fields"),
        ({"prompt": "7+5=", "ability": 1, "extra_fields": 1}, "extra_fields"),
    ],
)
def test_what_is_not_understood_says_what_is(record: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        to_rollout(record)
