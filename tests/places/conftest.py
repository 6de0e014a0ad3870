"""Places for payloads: folders, and an object store behind a relay."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from replaybuf.storage.places import store as place_store
from replaybuf.storage.places.folder import FolderStore
from replaybuf.storage.places.owners import claim, open_place
from replaybuf.storage.places.store import ALIGNMENT, Extent, PlaceStore, file_name
from replaybuf.storage.sql.tasks import payload_files as tasks
from replaybuf.storage.sql.tasks import sweeper
from tests.faults.conftest import _no_process_is_left, figures
from tests.places.arrays import PLACES, Kept, kept_at
from tests.places.relay import Relay

__all__ = ["_no_process_is_left", "figures"]

PATIENCE = 3.0
HOME = {"host": "node-1", "path": "/runs/run.db", "inode": "7", "name": "/runs/run.db on node-1"}


@pytest.fixture(scope="session")
def object_store() -> Iterator[Relay]:
    """A server with S3's interface."""
    moto = pytest.importorskip("moto.moto_server.werkzeug_app")
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    relay = Relay(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = make_server("127.0.0.1", 0, relay, threaded=True, request_handler=moto.MotoRequestHandler)
    relay.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield relay
    server.shutdown()


@pytest.fixture
def relay(object_store: Relay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """The object store, which the environment names as the endpoint, with credentials."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRET")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield object_store
    object_store.well()


@pytest.fixture
def bucket(relay: Relay) -> str:
    """`s3://bucket/prefix`, empty. The name is one of which texts of errors make something else."""
    name = f"range-{uuid.uuid4().hex[:12]}"
    urlopen(Request(f"{relay.url}/{name}", method="PUT")).close()
    return f"s3://{name}/run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for payloads, empty."""
    place = tmp_path / "payloads"
    place.mkdir()
    return place


@pytest.fixture(params=["folder", "objects"])
def place(request: pytest.FixtureRequest) -> str:
    """What the setting `payloads` names: a folder, an object store."""
    return str(request.getfixturevalue("folder" if request.param == "folder" else "bucket"))


@pytest.fixture
def store(place: str) -> Iterator[PlaceStore]:
    """An open place, which is marked."""
    store = open_place(place, PATIENCE)
    store.prepare()
    claim(store, "d" * 32, 1, HOME)
    yield store
    store.close()


@pytest.fixture(params=["sqlite-folder", "postgresql-folder", "sqlite-objects"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The URL of an empty database, and a place."""
    database, kind = request.param.split("-")
    place = request.getfixturevalue("folder" if kind == "folder" else "bucket")
    url = f"sqlite:///{tmp_path}/buffer.db" if database == "sqlite" else request.getfixturevalue("lent_database")
    return url, str(place)


@pytest.fixture
def url(shared_url: str) -> str:
    """The URL of an empty database that lasts."""
    return shared_url


@pytest.fixture
def soon_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads of groups that have left are swept at once, and files are small."""
    monkeypatch.setattr(sweeper, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(sweeper, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(place_store, "FILE_BYTES", 450_000)
    monkeypatch.setattr(tasks, "_CHECK_SECONDS", 0.1)


# Payloads with large arrays (`deferred`)


def _some(*by_default: str, of: list[str] = PLACES) -> list[Any]:
    """Places as parameters: those that aren't named are for the long form."""
    return [place if place in by_default else pytest.param(place, marks=pytest.mark.long) for place in of]


@pytest.fixture(params=_some("sqlite", "postgresql", "sqlite, objects"))
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return kept_at(request.param, request, tmp_path)


@pytest.fixture(params=_some("sqlite", "postgresql, folder", of=[place for place in PLACES if place != "memory"]))
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    """Payloads that other processes can read."""
    return kept_at(request.param, request, tmp_path)


@pytest.fixture(
    params=_some("postgresql", "sqlite, folder", of=[place for place in PLACES if place not in ("memory", PLACES[2])])
)
def on_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    """Payloads that a test can damage."""
    return kept_at(request.param, request, tmp_path)


@pytest.fixture(params=_some("sqlite, folder", of=[place for place in PLACES if "folder" in place]))
def kept_apart(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return kept_at(request.param, request, tmp_path)


@pytest.fixture
def in_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return kept_at("sqlite, folder", request, tmp_path)


@pytest.fixture
def in_file(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return kept_at("sqlite", request, tmp_path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[list[Extent]]:
    """What is read of folders: the extents of each call that wants any."""
    calls: list[list[Extent]] = []
    read = FolderStore.read

    def noted(store: FolderStore, extents: list[Extent]) -> list[Any]:
        calls.extend([[*extents]] if extents else [])
        return read(store, extents)

    monkeypatch.setattr(FolderStore, "read", noted)
    return calls


DATABASE = "d" * 32


def written(store: PlaceStore, number: int, *payloads: Any, sync: bool = True) -> list[Extent]:
    """Write a file with these payloads; return where they are."""
    at, extents, buffers = 0, [], []
    for raw in payloads:
        extents.append(Extent(1, number, at, len(raw)))
        buffers += [raw, bytes(-len(raw) % ALIGNMENT)]
        at += len(raw) + -len(raw) % ALIGNMENT
    store.write([(file_name(number), buffers)], sync=sync)
    return extents


def read(store: PlaceStore, *extents: Extent) -> list[Any]:
    parts = store.read(extents)
    return [part if isinstance(part, Exception) else bytes(part) for part in parts]
