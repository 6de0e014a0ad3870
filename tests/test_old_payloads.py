"""Payloads of older versions are read as what they were written from."""

from __future__ import annotations

from replaybuf.codec.payload import Codec
from replaybuf.rollouts.rollout import RolloutState, Status
from replaybuf.rollouts.rollout_type import RolloutType

#: What 0.1.0 wrote of `rollout()`, when Status was defined in another module.
WRITTEN = bytes.fromhex(
    "52504c4201000000010000009f00000000000000245b4fb2970000000000000087a76d6573736167659182a4726f6c65a475736572a7636f6e"
    "74656e74a532202b2032a8726573706f6e7365a134ac726573706f6e73655f6964739103ad7365715f7374616c656e65737300a6726577617264"
    "cb3ff0000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a761626f72746564ac657874"
    "72615f6669656c647380"
)


def rollout() -> RolloutState:
    message = [{"role": "user", "content": "2 + 2"}]
    return RolloutState(message=message, response="4", response_ids=[3], status=Status.ABORTED, reward=1.0)


def test_a_status_in_a_dict_comes_back_as_a_status() -> None:
    [read] = Codec(RolloutType(dict)).decode(WRITTEN)
    assert type(read["status"]) is Status
    assert read["status"] == Status.ABORTED


def test_a_rollout_is_written_as_it_was_then() -> None:
    codec = Codec(RolloutType(RolloutState))
    assert codec.decode(WRITTEN) == [rollout()]
    assert codec.encode([rollout()]) == WRITTEN
