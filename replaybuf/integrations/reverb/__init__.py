"""DeepMind Reverb's names over the store: tables, selectors, rate limiters and a client.

    import replaybuf.integrations.reverb as reverb

    table = reverb.Table(
        name="replay",
        sampler=reverb.selectors.Prioritized(0.6),
        remover=reverb.selectors.Fifo(),
        max_size=100_000,
        rate_limiter=reverb.rate_limiters.MinSize(1_000),
    )
    client = reverb.Client("sqlite:///run.db", tables=[table])

`docs/reverb.md` says what differs.
"""

from replaybuf.errors import FullError, NotReadyError, ReplayBufError
from replaybuf.integrations.reverb import rate_limiters, selectors
from replaybuf.integrations.reverb.client import SAMPLE_TIMEOUT, Client, ReplaySample, SampleInfo
from replaybuf.integrations.reverb.table import Table

__all__ = [
    "SAMPLE_TIMEOUT",
    "Client",
    "ReplaySample",
    "SampleInfo",
    "Table",
    "errors",
    "rate_limiters",
    "selectors",
]


class errors:  # noqa: N801
    """Reverb's names of errors, as aliases of replaybuf's."""

    #: The base class of all errors.
    ReverbError = ReplayBufError
    #: The timeout of a call: samples raise NotReadyError, inserts FullError.
    DeadlineExceededError = (NotReadyError, FullError)
