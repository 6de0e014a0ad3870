"""Reverb's names of errors, as aliases of replaybuf's."""

from __future__ import annotations

from replaybuf.errors import FullError, NotReadyError, ReplayBufError

#: The base class of all errors.
ReverbError = ReplayBufError
#: The timeout of a call: samples raise NotReadyError, inserts FullError.
DeadlineExceededError = (NotReadyError, FullError)
