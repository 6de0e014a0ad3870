"""Payloads in an object store: what it answers, and what is said when it doesn't."""

from __future__ import annotations

import os
import threading

import pytest

from replaybuf.errors import PayloadStoreError
from replaybuf.storage.places.objects import ObjectStore
from replaybuf.storage.places.owners import claim
from tests.places.conftest import HOME, PATIENCE
from tests.places.relay import Relay
from tests.places.written import DATABASE, read, written


@pytest.fixture
def objects(bucket: str) -> ObjectStore:
    store = ObjectStore(bucket, PATIENCE)
    claim(store, DATABASE, 1, HOME)
    return store


def test_an_answer_that_it_cannot_is_asked_again(objects: ObjectStore, relay: Relay) -> None:
    [extent] = written(objects, 1, b"x" * 1000)
    for status, call in ((500, lambda: read(objects, extent)), (503, lambda: written(objects, 2, b"y"))):
        relay.status = status
        threading.Timer(0.2, relay.well).start()
        call()
    assert read(objects, extent) == [b"x" * 1000]


@pytest.mark.parametrize("way", ["away", pytest.param("500", marks=pytest.mark.long)])
def test_a_store_that_is_down_is_not_damage(objects: ObjectStore, relay: Relay, way: str) -> None:
    """Whatever its name has in it; and the sentence says how long it was asked."""
    [extent] = written(objects, 1, b"x" * 1000)
    impatient = ObjectStore(objects.url, 1.0)
    relay.leave() if way == "away" else setattr(relay, "status", int(way))
    with pytest.raises(PayloadStoreError, match=r"asked again for 0.8 s|didn't answer within"):
        read(impatient, extent)
    with pytest.raises(PayloadStoreError, match=r"asked again for 0.8 s"):
        written(impatient, 2, b"y")
    relay.well()
    assert read(objects, extent) == [b"x" * 1000]


def test_refused_credentials_are_said_at_once_and_not_shown(objects: ObjectStore, relay: Relay) -> None:
    [extent] = written(objects, 1, b"x" * 1000)
    relay.status = 403
    before = len(relay.requests)
    with pytest.raises(PayloadStoreError, match="refuses these credentials") as refused:
        read(objects, extent)
    assert len(relay.requests) - before == 1
    assert "SECRET" not in str(refused.value)
    with pytest.raises(PayloadStoreError, match="refuses these credentials"):
        written(objects, 2, b"y")


def test_who_may_only_read_is_found_out(objects: ObjectStore, relay: Relay) -> None:
    relay.status, relay.when = 403, lambda line: line.startswith("PUT")
    objects.check_writable()
    with pytest.raises(PayloadStoreError, match="refuses these credentials"):
        objects.check_may_write()


def test_a_body_that_is_cut_is_asked_for_again(objects: ObjectStore, relay: Relay) -> None:
    raw = os.urandom(1_000_000)
    [extent] = written(objects, 1, raw)
    for link in relay._links:
        link.close()
    relay.cut_after, relay.cuts = 300_000, 2
    assert read(objects, extent) == [raw]


def test_a_bucket_that_is_not_there_is_said_so(relay: Relay) -> None:
    store = ObjectStore("s3://nobody-made-it/run", PATIENCE)
    with pytest.raises(PayloadStoreError, match="no such bucket; make it, or correct the name"):
        claim(store, DATABASE, 1, HOME)
    with pytest.raises(PayloadStoreError, match="no such bucket"):
        written(store, 1, b"x")


def test_a_forked_process_is_told_how_to_start(objects: ObjectStore, bucket: str) -> None:
    """`obstore` has its threads in the parent only."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            ObjectStore(bucket, PATIENCE)
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    assert os.read(reading, 1000).startswith(b"PayloadStoreError")
