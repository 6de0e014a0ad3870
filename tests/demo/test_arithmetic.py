"""The arithmetic task: tokens, the stream of prompts, the verifier."""

import numpy as np
import pytest

from replaybuf.demo.arithmetic import (
    CHARACTERS,
    END,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    PROMPTS,
    Prompt,
    decode,
    encode,
    finish_reason,
    prompt_at,
    verify,
)


def answer(text: str, *, ended: bool = True) -> np.ndarray:
    ids = encode(text)
    return np.append(ids, np.int32(END)) if ended else ids


def test_decode_undoes_encode():
    assert decode(encode(CHARACTERS)) == CHARACTERS


def test_decode_stops_at_the_end_token():
    assert decode([1, END, 2]) == "1"


def test_encode_refuses_other_characters():
    with pytest.raises(ValueError, match="'7x5='"):
        encode("7x5=")


def test_the_prompts_are_distinct_and_fit_the_model():
    assert len({p.text for p in PROMPTS}) == len(PROMPTS) == 72
    assert max(len(p.ids) for p in PROMPTS) == MAX_PROMPT_TOKENS
    assert max(len(answer(str(p.answer))) for p in PROMPTS) == MAX_RESPONSE_TOKENS


@pytest.mark.parametrize(("text", "expected"), [("7+5=", 12), ("14-9=", 5)])
def test_the_answer_is_worked_out_from_the_text(text, expected):
    assert Prompt(text).answer == expected


def test_other_text_has_no_answer():
    with pytest.raises(ValueError, match="not a prompt"):
        _ = Prompt("7+=").answer


def test_an_epoch_of_the_stream_has_every_prompt_once():
    assert {prompt_at(3, i) for i in range(len(PROMPTS))} == set(PROMPTS)


def test_the_stream_is_a_function_of_seed_and_index():
    assert [prompt_at(3, i) for i in range(200)] == [prompt_at(3, i) for i in range(200)]
    assert [prompt_at(3, i) for i in range(20)] != [prompt_at(4, i) for i in range(20)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: p.text)
def test_the_right_number_has_the_full_reward(prompt):
    assert verify(prompt, answer(str(prompt.answer))) == 1.0


@pytest.mark.parametrize("text", ["1", "11", "0"])
def test_another_number_has_a_little_reward(text):
    assert verify(Prompt("7+5="), answer(text)) == 0.1


@pytest.mark.parametrize("text", ["", "+", "-2", "012", "1=", "="])
def test_what_is_not_a_number_has_no_reward(text):
    assert verify(Prompt("7+5="), answer(text)) == 0.0


def test_an_answer_that_was_cut_off_has_no_reward():
    assert verify(Prompt("7+5="), answer("12", ended=False)) == 0.0


def test_finish_reason_tells_ended_from_cut_off():
    assert [finish_reason(answer("12")), finish_reason(answer("123", ended=False))] == ["stop", "length"]
