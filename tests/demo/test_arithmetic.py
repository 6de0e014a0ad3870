"""The arithmetic task: tokens, the stream of prompts, the verifier."""

from __future__ import annotations

import pytest

from replaybuf.demo.policy import (
    CHARACTERS,
    END,
    MAX_RESPONSE_TOKENS,
    PROMPTS,
    Prompts,
    answer_of,
    decode,
    encode,
    is_over,
    prompt_of,
    verify,
)


def answer(text: str) -> list[int]:
    return [*encode(text), END]


def test_decode_undoes_encode() -> None:
    assert decode(answer(CHARACTERS)) == CHARACTERS


def test_the_prompts_are_distinct_and_their_answers_fit() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) == 72
    assert max(len(answer(str(answer_of(prompt)))) for prompt in PROMPTS) == MAX_RESPONSE_TOKENS


@pytest.mark.parametrize(("text", "expected"), [("7+5=", 12), ("14-9=", 5)])
def test_the_answer_is_worked_out_from_the_text(text: str, expected: int) -> None:
    assert answer_of(text) == expected


def test_other_text_has_no_answer() -> None:
    with pytest.raises(ValueError, match="not a prompt"):
        answer_of("7+=")


def test_an_epoch_of_the_stream_has_every_prompt_once() -> None:
    stream = Prompts(3, 100)
    assert {prompt_of([stream[number]]) for number in range(len(PROMPTS))} == set(PROMPTS)
    with pytest.raises(IndexError):
        stream[100]


def test_the_stream_is_a_function_of_seed_and_number() -> None:
    first, longer, other = ([prompt_of([Prompts(*of)[n]]) for n in range(80)] for of in ((3, 80), (3, 100), (4, 80)))
    assert first == longer != other


@pytest.mark.parametrize(
    ("prompt", "reward"), [("12", 1.0), ("1", 0.1), ("0", 0.1), ("", 0.0), ("+", 0.0), ("-2", 0.0), ("01", 0.0)]
)
def test_the_reward_of_an_answer(prompt: str, reward: float) -> None:
    assert verify("7+5=", answer(prompt)) == reward


def test_an_answer_that_was_cut_off_is_over_and_has_no_reward() -> None:
    assert is_over(encode("123"))
    assert verify("7+5=", encode("123")) == 0.0
    assert not is_over(encode("12"))
    assert not is_over([])
