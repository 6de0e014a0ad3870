"""The peers: their adapters, the packages that they need, and what is known of them besides the measurements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages with their versions, for a virtual environment; `torch` is the CPU build of its own index.

    `newest` is the last minor version of Python 3 that has wheels of all of them; the first is 10.
    """

    packages: tuple[str, ...]
    megabytes: int
    torch: str = ""
    newest: int = 13


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer. `power` is what a power cut leaves, by its settings; what `kill -9` leaves is measured.

    `share` is the part of the groups that it puts and takes, for those that would need minutes for all.
    """

    title: str
    adapter: str
    environment: str
    power: str
    note: str = ""
    package: str = ""
    postgres: bool = False
    share: float = 1.0

    @property
    def version(self) -> str:
        """The package that is measured, with its version; "" for those of this environment."""
        packages = ENVIRONMENTS[self.environment].packages
        return next((package for package in packages if package.startswith(self.package)), "") if self.package else ""


#: "" is the environment that runs the command.
ENVIRONMENTS = {
    "": Environment((), 0),
    "reverb": Environment(("dm-reverb==0.14.0", "tensorflow-cpu==2.15.1"), 1300, newest=11),
    "transferqueue": Environment(
        ("TransferQueue==0.1.11", "tensordict==0.15.3", "ray==2.60.0"), 1400, torch="torch==2.13.0"
    ),
    "torchrl": Environment(("torchrl==0.14.1", "tensordict==0.14.3"), 1000, torch="torch==2.13.0"),
    "trinity": Environment(
        ("trinity-rft==0.6.0", "datasets==4.0.0", "pyarrow==20.0.0", "greenlet>=3", "asyncpg>=0.30"),
        2200,
        torch="torch==2.13.0",
        newest=12,
    ),
    "files": Environment(("diskcache==5.6.3", "persist-queue==1.1.0", "msgpack>=1.1", "numpy>=1.26"), 100),
}

_NORMAL = "all but the last seconds"
_MEMORY = "nothing"

PEERS = {
    "replaybuf-sqlite": Peer(
        "replaybuf, SQLite",
        "ours:ReplayBuf",
        "",
        f"{_NORMAL}; all with durability=full",
        "decoded, checksums verified; one process or many",
    ),
    "replaybuf-sqlite-many": Peer(
        "replaybuf, SQLite, put_many of 64",
        "ours:ReplayBufMany",
        "",
        f"{_NORMAL}; all with durability=full",
        "as above; 64 groups are committed together",
    ),
    "replaybuf-sqlite-folder": Peer(
        "replaybuf, SQLite and a folder",
        "ours:ReplayBufWithFolder",
        "",
        f"{_NORMAL}; all with durability=full",
        "arrays apart from 64 KiB of them on; decoded, checksums verified; one process or many",
    ),
    "replaybuf-postgresql": Peer("replaybuf, PostgreSQL", "ours:ReplayBuf", "", "all", postgres=True),
    "replaybuf-postgresql-folder": Peer(
        "replaybuf, PostgreSQL and a folder", "ours:ReplayBufWithFolder", "", "all", postgres=True
    ),
    "sqlite3": Peer("sqlite3, a put a transaction", "floors:Sqlite", "", _NORMAL, "bytes: encodes, decodes nothing"),
    "sqlite3-tuned": Peer(
        "sqlite3, 64 puts a transaction", "floors:TunedSqlite", "", _NORMAL, "bytes; 64 puts are lost or kept together"
    ),
    "asyncpg": Peer(
        "asyncpg, 8 connections", "floors:Asyncpg", "", "all", "bytes: encodes, decodes nothing", postgres=True
    ),
    "fdatasync": Peer(
        "a file, fdatasync every 64", "floors:File", "", "all", "bytes; one process; removes nothing, has no index"
    ),
    "reverb": Peer(
        "Reverb",
        "deepmind_reverb:Reverb",
        "reverb",
        _MEMORY,
        "memory; rollouts of a group stacked: equal lengths only",
        package="dm-reverb",
    ),
    "transferqueue": Peer(
        "TransferQueue",
        "verl_queue:TransferQueue",
        "transferqueue",
        _MEMORY,
        "memory; rollouts of a group stacked; its checkpoint of 205 MB took 25 s and 6.5 GB: not called here",
        package="TransferQueue",
    ),
    "torchrl": Peer(
        "TorchRL, memory-mapped",
        "memmap:TorchRL",
        "torchrl",
        "nothing that it finds again: the index is in memory until dumps()",
        "one process; all groups of one shape; sampling removes nothing",
        package="torchrl",
    ),
    "trinity-sqlite": Peer(
        "Trinity-RFT, SQLite",
        "trinity_rft:Trinity",
        "trinity",
        "all",
        "reads mark rows, remove nothing",
        share=1 / 8,
        package="trinity-rft",
    ),
    "trinity-postgresql": Peer(
        "Trinity-RFT, PostgreSQL",
        "trinity_rft:Trinity",
        "trinity",
        "all",
        "as above",
        postgres=True,
        share=1 / 8,
        package="trinity-rft",
    ),
    "diskcache": Peer(
        "diskcache",
        "small:DiskCache",
        "files",
        "all but the last seconds; groups of more than 32 KB are files that nobody synced",
        "pickled; groups of more than 32 KB are files of their own",
        package="diskcache",
    ),
    "diskcache-many": Peer(
        "diskcache, 64 puts a transaction",
        "small:DiskCacheMany",
        "files",
        "all but the last seconds; groups of more than 32 KB are files that nobody synced",
        "as above; 64 puts are lost or kept together",
        package="diskcache",
    ),
    "persist-queue": Peer(
        "persist-queue",
        "small:PersistQueue",
        "files",
        "all",
        "pickled; one process; no batches",
        share=1 / 8,
        package="persist-queue",
    ),
}
