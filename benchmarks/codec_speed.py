"""How fast the codec is, beside bare msgpack, XXH3 and memcpy: `python -m benchmarks codec`.

Each line is the best of many repeats. The lines of one section are measured in turn, so that a noisy machine affects
them alike.
"""

from __future__ import annotations

import timeit
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
from pydantic import BaseModel, Field
from xxhash import xxh3_64_intdigest

from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import RolloutState, Status
from replaybuf.values.rollouts.rollout_type import RolloutType

STATES = RolloutType(RolloutState)
CODEC = Codec(STATES)
RNG = np.random.default_rng(0)
MESSAGE = [{"role": "user", "content": "What is 12 times 7? " * 10}, {"role": "assistant", "content": "84 " * 20}]


def compare(title: str, cases: dict[str, Callable[[], Any]], repeats: int = 40) -> dict[str, float]:
    """Print the best time of each case in microseconds; return them, in seconds."""
    print(title)
    best = dict.fromkeys(cases, float("inf"))
    timers = {name: timeit.Timer(case) for name, case in cases.items()}
    loops = {name: max(1, int(0.004 / timer.timeit(1))) for name, timer in timers.items()}
    for _ in range(repeats):
        for name, timer in timers.items():
            best[name] = min(best[name], timer.timeit(loops[name]) / loops[name])
    for name, seconds in best.items():
        print(f"  {name:32s} {seconds * 1e6:10.2f} us")
    return best


def rollout(length: int, as_list: bool) -> RolloutState:
    """Return a rollout of `length` response tokens, with seven token fields."""
    fields: dict[str, Any] = {
        "prompt_ids": RNG.integers(0, 150_000, 40).astype("i4"),
        "tokens": RNG.integers(0, 150_000, length + 40).astype("i4"),
        "response_ids": RNG.integers(0, 150_000, length).astype("i4"),
        "logprobs": RNG.normal(size=length).astype("f8" if as_list else "f4"),
        "response_mask": np.ones(length, "i1"),
        "response_model_steps": np.full(length, 41, "i4"),
    }
    if as_list:
        fields = {name: array.tolist() for name, array in fields.items()}
    return RolloutState(message=MESSAGE, rollout_id=1, status=Status.COMPLETED, seq_staleness=0, **fields)


def beside_msgpack(title: str, group: list[RolloutState]) -> None:
    """Compare the codec with msgpack on the same values, which msgpack doesn't make rollouts of."""
    payload = CODEC.encode(group)
    bare = [{**STATES.to_fields(one), "status": one.status.value} for one in group]
    packed = [msgpack.packb(one) for one in bare]
    cases: dict[str, Callable[[], Any]] = {
        "encode": lambda: CODEC.encode(group),
        "bare packb": lambda: [msgpack.packb(one) for one in bare],
        "decode": lambda: CODEC.decode(payload),
        "bare unpackb": lambda: [msgpack.unpackb(one) for one in packed],
        "of it to_fields": lambda: [STATES.to_fields(one) for one in group],
        "of it from_fields": lambda: [STATES.from_fields(dict(one)) for one in bare],
        "of it the checksum": lambda: CODEC.verify(payload),
    }
    compare(f"{title}, {len(payload):,} bytes", cases)


def beside_memcpy(title: str, groups: list[list[RolloutState]]) -> None:
    """Compare the codec with a copy of the bytes."""
    payloads = [CODEC.encode(group) for group in groups]
    cases: dict[str, Callable[[], Any]] = {
        "encode": lambda: [CODEC.encode(group) for group in groups],
        "decode": lambda: [CODEC.decode(payload) for payload in payloads],
        "decode in place": lambda: [CODEC.decode(payload, verified=True, owned=True) for payload in payloads],
        "the checksum": lambda: [CODEC.verify(payload) for payload in payloads],
        "XXH3": lambda: [xxh3_64_intdigest(payload) for payload in payloads],
        "crc32": lambda: [zlib.crc32(payload) for payload in payloads],
        "memcpy": lambda: [bytearray(payload) for payload in payloads],
    }
    compare(f"{title}, {sum(map(len, payloads)):,} bytes", cases)


class Params(BaseModel):
    """What a rollout was sampled with, as frameworks keep it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 2048
    stops: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    seed: int | None = None
    return_logprobs: bool = True


class Call(BaseModel):
    """A call of a tool."""

    call_id: str
    function: str
    arguments: dict[str, Any]


class Nested(RolloutState):
    """A rollout that holds instances of other classes."""

    sample_params: Params = Params()
    tool_calls: list[Call] | None = None


class Flat(Call, Params, RolloutState):
    """A rollout with the same values in fields of its own."""


def nested_beside_flat(title: str, group: list[RolloutState]) -> None:
    """Compare rollouts that hold a model and a list of one model with flat ones of as many bytes."""
    nested, flat = Codec(RolloutType(Nested)), Codec(RolloutType(Flat))
    call = Call(call_id="call_1", function="add", arguments={"a": 12, "b": 7})
    holding = [Nested(**dict(one), sample_params=Params(), tool_calls=[call]) for one in map(_values, group)]
    plain = [Flat(**dict(one), **dict(call)) for one in map(_values, group)]
    spare = (len(nested.encode(holding)) - len(flat.encode(plain))) // len(group)
    plain = [one.model_copy(update={"response": "x" * spare}) for one in plain]
    first, second = nested.encode(holding), flat.encode(plain)
    cases: dict[str, Callable[[], Any]] = {
        "encode and decode nested": lambda: (nested.encode(holding), nested.decode(first)),
        "encode and decode flat": lambda: (flat.encode(plain), flat.decode(second)),
    }
    best = compare(f"{title}, {len(first):,} and {len(second):,} bytes", cases)
    print(f"  {'nested / flat':32s} {best['encode and decode nested'] / best['encode and decode flat']:10.2f}")


def _values(one: RolloutState) -> dict[str, Any]:
    return {name: value for name, value in one if value is not None}


def main() -> None:
    """Print all sections."""
    beside_msgpack("one small rollout, lists", [rollout(40, True)])
    beside_msgpack("8 rollouts of 700 tokens, lists", [rollout(700, True) for _ in range(8)])
    beside_msgpack("1 rollout of 20,000 tokens, lists", [rollout(20_000, True)])
    nested_beside_flat("8 rollouts of 40 tokens, lists", [rollout(40, True) for _ in range(8)])
    nested_beside_flat("8 rollouts of 700 tokens, lists", [rollout(700, True) for _ in range(8)])
    nested_beside_flat("8 rollouts of 700 tokens, arrays", [rollout(700, False) for _ in range(8)])
    beside_memcpy("8 rollouts of 700 tokens, arrays", [[rollout(700, False) for _ in range(8)]])
    beside_memcpy("1 rollout of 6,000 tokens, arrays", [[rollout(6000, False)]])
    beside_memcpy("64 groups of 1 rollout of 6,000 tokens", [[rollout(6000, False)] for _ in range(64)])
    beside_memcpy("64 groups of 8 rollouts of 700 tokens", [[rollout(700, False) for _ in range(8)] for _ in range(64)])


if __name__ == "__main__":
    main()
