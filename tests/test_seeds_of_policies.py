"""Seeds of random policies."""

from __future__ import annotations

import pytest

from replaybuf.errors import ConfigError
from replaybuf.rules.policies import UniformPolicy


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_seed_has_64_bits(seed: int) -> None:
    assert UniformPolicy(seed).seed == seed


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1", True])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="seed must be a whole number of at least 0, below 2"):
        UniformPolicy(seed)  # type: ignore[arg-type]
