"""Compressed payloads."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from replaybuf.codec.payload import Codec
from replaybuf.errors import ConfigError, DecodeError, MissingDriverError
from replaybuf.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, PAYLOAD, ZSTD, sealed


@pytest.mark.parametrize("value", ["x" * 10_000, np.zeros(10_000_000, "u1"), "short", np.arange(100)], ids=type)
def test_compressed_payloads_come_back(value: Any) -> None:
    payload = ZSTD.encode([{"field": value}])
    (back,) = DICTS.decode(payload)  # any codec reads them
    assert type(back["field"]) is type(value)
    assert np.array_equal(back["field"], value)


def test_compression_makes_payloads_smaller_and_never_larger() -> None:
    assert len(ZSTD.encode([{"a": "x" * 10_000}])) < 200
    noise = np.random.default_rng(0).bytes(1000)
    assert len(ZSTD.encode([{"a": noise}])) == len(DICTS.encode([{"a": noise}]))


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    for claimed in (100_000_000, 100, 2**63):
        with pytest.raises(DecodeError, match=r"too many|don't agree"):
            DICTS.decode(sealed(bomb, flags=1, size=claimed))


def test_a_missing_zstandard_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = ZSTD.encode([{"a": "x" * 10_000}])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDriverError, match="pip install zstandard"):
        Codec(RolloutType(dict), compression="zstd")
    with pytest.raises(MissingDriverError, match="pip install zstandard"):
        DICTS.decode(payload)
    DICTS.verify(payload)
    DICTS.decode(PAYLOAD)


def test_an_unknown_compression_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'none' or 'zstd'"):
        Codec(RolloutType(dict), compression="gzip")  # type: ignore[arg-type]
