"""Payloads in an object store: S3, Google Cloud Storage or Azure Blob Storage, through `obstore`."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import numpy as np

from replaybuf.common.redact import redact
from replaybuf.errors import ConfigError, DecodeError, MissingDriverError, PayloadStoreError
from replaybuf.storage.places.store import FILES, MARKER, Extent, PlaceStore

#: The schemes of URLs: of S3, Google Cloud Storage and Azure Blob Storage.
SCHEMES: Final = ("s3", "gs", "az")
_REQUESTS = 16  # concurrent
#: The share of the caller's timeout after which a request is given up, so that the error can quote the answer.
_PART_OF_PATIENCE = 0.8
_STATUS = re.compile(r"\b(?:status(?: code)?:?|HTTP error) *\(?([1-5]\d\d)\b|\b([45]\d\d) [A-Z][a-z]+")

#: The process in which `obstore` runs its threads, which a forked child doesn't have.
_running_pid: int | None = None


class ObjectStore(PlaceStore):
    """Payloads as objects, each of which is written once, atomically.

    A request is retried for up to `patience` seconds if the store doesn't answer, or answers with a transient error.
    Credentials, region and endpoint come from the environment, as for `obstore`.
    """

    def __init__(self, url: str, patience: float = 60.0) -> None:
        try:
            self._obstore: Any = importlib.import_module("obstore")
            stores: Any = importlib.import_module("obstore.store")
            self._errors: Any = importlib.import_module("obstore.exceptions")
        except ImportError as error:
            raise MissingDriverError(
                f"payloads in {url.partition('://')[0]}:// need the package obstore, which is not installed: "
                "pip install obstore"
            ) from error
        self.errors = (self._errors.BaseError, OSError)
        self.url = url.rstrip("/")
        self._patience = _PART_OF_PATIENCE * patience
        client = {"timeout": "30s", "connect_timeout": "5s", "allow_http": _endpoint(url).startswith("http://")}
        retries = {"max_retries": 1000, "retry_timeout": timedelta(seconds=self._patience), "backoff": _BACKOFF}
        try:
            self._store = stores.from_url(self.url, client_options=client, retry_config=retries)
        except (ValueError, self._errors.BaseError) as error:
            raise ConfigError(
                f"can't read payloads={self.url!r}: expected s3://bucket/prefix, gs://bucket/prefix or "
                "az://container/prefix, with credentials in the environment"
            ) from error
        self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="replaybuf-objects")
        _check_process(self.url)

    def read_marker(self) -> bytes | None:
        with self.ours("read"):
            try:
                return bytes(self._obstore.get(self._store, MARKER).bytes())
            except FileNotFoundError:
                return None

    def write_marker(self, marker: bytes, *, replace: bool = False) -> bool:
        mode = "overwrite" if replace else "create"
        with self.ours("written to"):
            try:
                self._obstore.put(self._store, MARKER, marker, mode=mode, use_multipart=False)
            except self._errors.AlreadyExistsError:
                return False
        return True

    def write(self, files: Sequence[tuple[str, Sequence[Any]]], *, sync: bool) -> None:
        def put(file: tuple[str, Sequence[Any]]) -> None:
            name, buffers = file
            with self.ours("written to"):
                self._obstore.put(self._store, f"{FILES}/{name}", b"".join(buffers), use_multipart=False)

        list(self._pool.map(put, files))  # raises what a put has raised

    def read_files(self, names: Iterable[str], ranges: Iterable[Sequence[Extent]]) -> Iterable[Sequence[Any]]:
        return self._pool.map(self.read_file, names, ranges)

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> Sequence[Any]:
        filled = [extent for extent in extents if extent.size]
        starts, lengths = [extent.at for extent in filled], [extent.size for extent in filled]
        try:
            contents = iter(self._obstore.get_ranges(self._store, f"{FILES}/{name}", starts=starts, lengths=lengths))
        except self._errors.GenericError as error:
            if _status(error) != "416" and "Requested range was invalid" not in str(error):
                raise
            return [DecodeError(f"the file {name} is shorter than it was: it was cut short")] * len(extents)
        # Copied, since obstore's buffers are read-only.
        return [np.frombuffer(next(contents) if extent.size else b"", np.uint8).copy() for extent in extents]

    def delete(self, names: Iterable[str]) -> None:
        def remove(name: str) -> None:
            with self.ours("written to"), contextlib.suppress(FileNotFoundError):
                self._obstore.delete(self._store, f"{FILES}/{name}")

        list(self._pool.map(remove, names))

    def files(self) -> Iterator[tuple[str, float]]:
        with self.ours("read"):
            for page in self._obstore.list(self._store, prefix=FILES):
                for item in page:
                    yield item["path"].rpartition("/")[2], item["last_modified"].timestamp()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def error(self, error: Exception, action: str) -> PayloadStoreError:
        status, server = _status(error), redact(_endpoint(self.url)) or "the store"
        refusals = self._errors.UnauthenticatedError, self._errors.PermissionDeniedError, PermissionError
        if isinstance(error, refusals) or status in ("401", "403"):
            reason = f"{server} refuses these credentials, which are those of the environment (docs/payloads.md)"
        elif isinstance(error, FileNotFoundError) or status == "404" or "NoSuchBucket" in str(error):
            reason = "there is no such bucket; make it, or correct the name"
        else:
            answer = f"answered {status}" if status else "didn't answer"
            reason = f"{server} {answer}, and was asked again for {self._patience:g} s; is it up, its endpoint right?"
        return PayloadStoreError(f"{self.url} can't be {action}: {reason}")


_BACKOFF: Final = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2}


def _status(error: Exception) -> str | None:
    """Return the HTTP status of the store's answer, if there was one."""
    return next((match[1] or match[2] for match in _STATUS.finditer(str(error))), None)


def _check_process(url: str) -> None:
    """Record that `obstore` runs in this process. Raises PayloadStoreError in a forked child: its calls would hang."""
    global _running_pid
    if _running_pid not in (None, os.getpid()):
        raise PayloadStoreError(
            f"{url} can't be used in this process, which was forked from one that uses an object store: start it with "
            "multiprocessing's 'spawn' or 'forkserver', or fork before the first buffer is opened"
        )
    _running_pid = os.getpid()


def _endpoint(url: str) -> str:
    """Return the endpoint that the environment names for a URL, "" for the provider's own."""
    return os.environ.get("AWS_ENDPOINT_URL", "") if url.startswith("s3:") else ""
