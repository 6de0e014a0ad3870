"""Reverb's errors: the names by which its users catch them, for the errors that are raised here."""

from __future__ import annotations

from replaybuf.errors import FullError, NotReadyError, ReplayBufError

#: The base class of all errors.
ReverbError = ReplayBufError
#: A call has waited for as long as it may: samples raise NotReadyError, inserts FullError.
DeadlineExceededError = (NotReadyError, FullError)
