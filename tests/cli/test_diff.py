"""`replaybuf diff`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from replaybuf.cli.diff import same
from tests.cli.conftest import run, run_json
from tests.cli.test_escape import UNSAFE


def test_prompts_and_responses_are_compared_word_by_word(filled: str) -> None:
    shown = run("diff", filled, 15, 12).stdout
    assert "Find all primes p such that p^2 + [-15-]{+12+} is a perfect square." in shown
    assert "The answer is [-105-]{+84+}." in shown


def test_fields_that_differ_are_told_and_no_others(filled: str) -> None:
    found = run_json("diff", filled, 15, 12)
    fields = {(one["rollout"], one["field"]): (one["first"], one["second"]) for one in found["fields"]}
    assert fields[1, "reward"] == ({"score": 1.0}, {"score": 0.0})
    assert fields[0, "rollout_id"] in (("60", "48"), (60, 48))
    assert (None, "task_name") not in fields
    assert (0, "extra_fields") not in fields
    assert [text["field"] for text in found["texts"]] == ["prompt", *["response"] * 4]


def test_a_group_is_the_same_as_itself(filled: str) -> None:
    assert run_json("diff", filled, 15, 15)["fields"] == []
    shown = run("diff", filled, 15, 15).stdout
    assert "the same metadata" in shown
    assert "[-" not in shown


def test_lines_are_the_fields(filled: str) -> None:
    lines = run("diff", filled, 15, 12, "--nl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == run_json("diff", filled, 15, 12)["fields"]


def test_hostile_texts_are_escaped(hostile: str) -> None:
    shown = run("diff", hostile, 1, 1).stdout
    assert not [character for character in UNSAFE if character in shown]


@pytest.mark.parametrize("uids", [(), (15,), (15, "x"), (15, 12, 9)])
def test_anything_but_two_uids_is_a_usage_error(filled: str, uids: tuple[object, ...]) -> None:
    assert "UID" in run("diff", filled, *uids, code=2).stderr


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (np.zeros(2000), np.zeros(2000), True),
        (np.zeros(2000), np.r_[np.zeros(999), 1, np.zeros(1000)], False),
        ({"a": np.ones(2)}, {"a": np.ones(2)}, True),
        (float("nan"), float("nan"), True),
        (1, True, False),
        ([1, 2], [1], False),
    ],
)
def test_values_are_compared_as_wholes(first: object, second: object, alike: bool) -> None:
    assert same(first, second) is alike
