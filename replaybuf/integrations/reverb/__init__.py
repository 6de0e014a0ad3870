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

The module `open_instruct` has the smaller table of open-instruct. `docs/reverb.md` says what differs.
"""

import sys
from typing import Any

from replaybuf.integrations.reverb import errors, rate_limiters, selectors
from replaybuf.integrations.reverb.client import Client
from replaybuf.integrations.reverb.rate_limiters import CallStats, RateLimiterInfo
from replaybuf.integrations.reverb.table import SAMPLE_TIMEOUT, ReplaySample, SampleInfo, Table, TableInfo

__all__ = [
    "SAMPLE_TIMEOUT",
    "CallStats",
    "Client",
    "RateLimiterInfo",
    "ReplaySample",
    "SampleInfo",
    "Table",
    "TableInfo",
    "errors",
    "rate_limiters",
    "selectors",
]

_WHOLE = "insert each trajectory whole, with Client.insert; replaybuf.integrations.chunks joins fragments"
# Reverb's names that have no equal here, and what to use instead.
_INSTEAD = {
    "Server": "the database is the server; give its url and the tables to a Client",
    "TFClient": "use Client",
    "TimestepDataset": "use Client.sample_batch",
    "TrajectoryDataset": "use Client.sample_batch",
    "TrajectoryWriter": _WHOLE,
    "StructuredWriter": _WHOLE,
    "Writer": _WHOLE,
    "item_selectors": "use replaybuf.integrations.reverb.selectors",
}


def __getattr__(name: str) -> Any:
    advice = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    message = f"replaybuf.integrations.reverb has no {name}{advice}"
    # `from replaybuf.integrations.reverb import NAME` tests with hasattr, and its own ImportError wouldn't say this.
    if advice and sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
        raise ImportError(message, name=__name__)
    raise AttributeError(message)
