"""The `reason` of an error, for `pytest.raises(..., check=because("disk full"))`."""

from __future__ import annotations

from collections.abc import Callable

from replaybuf.errors import ReplayBufError


def because(reason: str) -> Callable[[BaseException], bool]:
    """Whether an error of ours has this reason."""
    return lambda error: isinstance(error, ReplayBufError) and error.reason == reason
