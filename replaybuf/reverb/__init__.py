"""DeepMind Reverb's names over the store: tables, selectors, rate limiters and a client.

    import replaybuf.reverb as reverb

    table = reverb.Table(
        name="replay",
        sampler=reverb.selectors.Prioritized(0.6),
        remover=reverb.selectors.Fifo(),
        max_size=100_000,
        rate_limiter=reverb.rate_limiters.MinSize(1_000),
    )
    client = reverb.Client("sqlite:///run.db", tables=[table])

`replaybuf.reverb.open_instruct` has the smaller table of open-instruct. `docs/reverb.md` says what differs.
"""

from replaybuf.reverb import rate_limiters, selectors
from replaybuf.reverb.client import Client
from replaybuf.reverb.samples import CallStats, RateLimiterInfo, ReplaySample, SampleInfo, TableInfo
from replaybuf.reverb.table import SAMPLE_TIMEOUT, Table

__all__ = [
    "SAMPLE_TIMEOUT",
    "CallStats",
    "Client",
    "RateLimiterInfo",
    "ReplaySample",
    "SampleInfo",
    "Table",
    "TableInfo",
    "rate_limiters",
    "selectors",
]
