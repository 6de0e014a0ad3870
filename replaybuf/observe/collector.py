"""A collector for the registry of prometheus_client, for processes that have an endpoint already."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from replaybuf.buffer.metrics import Meter
from replaybuf.errors import InputError, ReplayBufError
from replaybuf.observe.exposition import read_figures, samples_of

if TYPE_CHECKING:  # who reads a database from outside needs no buffer
    from replaybuf.buffer.replay_buffer import ReplayBuffer
    from replaybuf.sync.buffer import SyncReplayBuffer

_logger = logging.getLogger("replaybuf.observe")


class Collector:
    """The metrics of an open buffer, or of the database at a URL, whenever they are asked for.

        prometheus_client.REGISTRY.register(Collector(buffer))

    Of an open buffer there are its own waits, but none of what only the database knows (workers, batches, ...);
    `distributions` are as in `buffer.metrics()`. Of a URL, `name` is the buffer to read, if not all. A collection that
    fails, or isn't over after `timeout` seconds, gives `replaybuf_up` 0, and the first of several a warning in the log:
    the process's other metrics are there all the same. Needs the package prometheus_client. Raises InputError for any
    other source.
    """

    def __init__(
        self,
        source: ReplayBuffer[Any] | SyncReplayBuffer[Any] | str,
        *,
        name: str | None = None,
        distributions: bool = True,
        timeout: float = 10.0,
    ) -> None:
        self._source: Any = getattr(source, "asynchronous", source)
        if not isinstance(self._source, str) and not hasattr(self._source, "waits"):
            raise InputError(f"source must be a buffer or the URL of a database, got {type(source).__name__}")
        self._name = name
        self._distributions = distributions
        self._timeout = timeout
        self._down = False
        self._meter = Meter()  # of its own: that of the buffer gives rates since the caller's last reading

    def describe(self) -> list[Any]:
        """Return nothing: registering it reads nothing."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of prometheus_client."""
        from prometheus_client import Metric

        name = "" if isinstance(self._source, str) else str(self._source.storage.name)
        for metric, samples in samples_of(self._figures(), name):
            family = Metric(metric.name.removesuffix("_total"), metric.help, metric.kind)
            for sample in samples:
                family.add_sample(sample.series, sample.labels, sample.value)
            yield family

    def _figures(self) -> Mapping[str, Any]:
        try:
            figures = self._read()
        except (ReplayBufError, TimeoutError) as error:
            level = logging.DEBUG if self._down else logging.WARNING  # once, not at every scrape
            _logger.log(level, "metrics can't be read: %s", str(error) or f"nothing came for {self._timeout:g} s")
            self._down = True
            return {"up": 0, "buffers": {}}
        self._down = False
        return figures

    def _read(self) -> Mapping[str, Any]:
        if isinstance(self._source, str):
            return read_figures(self._source, buffer=self._name, timeout=self._timeout)
        from replaybuf.sync.loop import run

        return run(self._read_open(self._source))

    async def _read_open(self, buffer: ReplayBuffer[Any]) -> dict[str, Any]:
        async with asyncio.timeout(self._timeout):
            buffer.waits.check_open()
            return await self._meter.read(buffer.storage, buffer.waits, distributions=self._distributions)
