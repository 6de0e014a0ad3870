"""Arguments and results of the store, and the defaults of its timeouts, leases, history and checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple

from typing_extensions import TypeVar

from replaybuf.common import units
from replaybuf.common.checks import Tags
from replaybuf.errors import CheckpointError, FencedError, LeaseLostError
from replaybuf.rules.query import Node
from replaybuf.values.rollouts.group_fields import GroupFields
from replaybuf.values.rollouts.segments import Segments, count_of, entries_of, flat
from replaybuf.values.rollouts.staleness import NO_RULE, ExpiryRule
from replaybuf.values.rollouts.statuses import Status

#: The class of the rollouts in a buffer, for type checkers.
R = TypeVar("R", default=Any)

#: Default timeouts in seconds: of a statement's wait for a lock, and of retries after a lost connection.
LOCK_SECONDS, RECONNECT_SECONDS = 30.0, 60.0
#: Seconds that a lease lasts, by default, from its last renewal.
LEASE_SECONDS = 60.0
#: The number of step checkpoints kept by default.
KEEP_CHECKPOINTS = 3
#: The number of draws of a buffer whose history is kept by default.
HISTORY = 10_000


class Unset:
    """The type of UNSET: a value that was not given, where None has a meaning."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


@dataclass(slots=True)
class Part:
    """The place of a rollout in a group that fills until it has `size` rollouts; drawable if `least` are completed.

    `name` is the group's, or the uid of the prompt in flight whose rollout it is. The rollout gets its `index` when it
    is stored: the one `wanted`, or any free one (None). `train_step` and `rule` are its put's, for the whole group.
    """

    name: str | int
    size: int
    least: int
    index: int = 0
    task_name: str = ""
    wanted: int | None = None
    train_step: int | None = None
    rule: ExpiryRule = NO_RULE


@dataclass(frozen=True, slots=True)
class FillingGroup:
    """A group that isn't complete yet: the uids of its rollouts by index, and the indices that are missing.

    It becomes drawable with `size` rollouts, if at least `min_size` of them are completed.
    """

    task_name: str
    size: int
    min_size: int
    uids: dict[int, int]

    @property
    def missing(self) -> list[int]:
        """The indices of the rollouts that aren't there, ascending."""
        return [index for index in range(self.size) if index not in self.uids]


@dataclass(slots=True)
class NewGroup:
    """A group to be put, already normalised and checked by the rules of put.

    `train_step` is the step for which the rollouts' staleness was computed, None if they have their own or some of them
    are expired. `key` makes the put idempotent: a group of the same task and key is replaced. `replaces` are the uids
    of groups to remove in the same transaction; all must exist or, with a `lease`, be held by that lease. With
    `stays_leased` the lease holds the new group instead. `tags` belong to the caller: the store keeps and returns
    copies, and stores `{}` as None. `fetched` has the values of the rollouts' Ray ObjectRefs, for `Codec.encode`. If
    `dropped` is a list, the groups removed in the same transaction are added to it after the commit. `worker` is the
    worker name recorded with the put, and `put_step` the train step given to it. `fields` has the fields of the
    rollouts, if they are known. With `segments` these are in the place of `rollouts`. `judged` is added to the
    statistics of a prompt in the same transaction: the name of its ledger and its place in the dataset, the number of
    rollouts with a reward, and the sums of the rewards and of their squares.

    With a `part` this is a rollout of a group that fills or, made from `parts`, the uids of stored ones that it
    replaces, the whole group. The unfit rollouts that it goes without are the `rest`, a group stored with it.

    A group from another store has its `payload`, which is stored unchanged, and its `times_sampled`, `deliveries`,
    `error` and `trained_step`; `rollouts` are then only read.
    """

    task_name: str
    status: Status
    staleness: int
    rollouts: Sequence[Any]
    created_at: float
    train_step: int | None = None
    priority: float = 1.0
    tags: Tags | None = None
    key: str | None = None
    replaces: tuple[int, ...] = ()
    lease: Leased | None = None
    stays_leased: bool = False
    fetched: dict[Any, Any] | None = None
    dropped: list[StorageItem] | None = None
    part: Part | None = None
    parts: tuple[int, ...] = ()
    rest: NewGroup | None = None
    payload: bytes | bytearray | None = None
    times_sampled: int = 0
    deliveries: int = 0
    error: str | None = None
    worker: str | None = None
    put_step: int | None = None
    trained_step: int | None = None
    fields: GroupFields | None = None
    segments: Segments | None = None
    judged: tuple[str, int, int, float, float] | None = None

    def as_dropped(self) -> StorageItem:
        """Return the group as one that was dropped before it was stored, with the uid 0."""
        return StorageItem(
            uid=0,
            timestamp_id=0,
            task_name=self.task_name,
            status=self.status,
            staleness=self.staleness,
            priority=self.priority,
            times_sampled=0,
            created_at=self.created_at,
            reward=None,
            tags=dict(self.tags) if self.tags else None,
            key=self.key,
            item=entries_of(self.rollouts, self.segments),
            segments=self.segments,
        )


#: Annotations of groups by uid: those of the group, or a list with those of each rollout.
ByGroup = Mapping[int, Mapping[str, Any] | Sequence[Mapping[str, Any]]]


class Annotation(NamedTuple):
    """A named value of a group, or of each of its `rollouts` (their number), as in a row of `rb_annotation`."""

    name: str
    rollouts: int | None
    rows: Sequence[Sequence[Any]]
    data: bytes | None = None


@dataclass(slots=True)
class StorageItem(Generic[R]):
    """A stored group with its metadata.

    `uid` is never reused, `timestamp_id` is the position in insertion order; neither changes. `staleness` is in train
    steps, `times_sampled` counts the draws of the group (including this one, if it was drawn), `created_at` is in
    seconds since the epoch, `reward` the mean of its rollouts (None where none has one), `error` the reason why a group
    was set aside as FAILED, `deliveries` the number of leases without acknowledgement, and `item` the list of its
    rollouts as they were put, empty where the payload can't be decoded; `segments` says of what its rollouts consist,
    None for whole ones. `probability` is the group's probability in the draw, and
    `weight` its importance weight, if the draw asked for them. `worker` is the worker name recorded with its put, and
    `trained_step` the train step of its last consumption (draw without a lease, or acknowledgement) that had one.
    A FILLING item is one rollout, and `part` its place in its group, whose name is the `key`.
    """

    uid: int
    timestamp_id: int
    task_name: str
    status: Status
    staleness: int
    priority: float
    times_sampled: int
    created_at: float
    reward: float | None
    tags: Tags | None = None
    key: str | None = None
    error: str | None = None
    deliveries: int = 0
    item: list[R] = field(default_factory=list)
    probability: float | None = None
    weight: float | None = None
    worker: str | None = None
    trained_step: int | None = None
    part: Part | None = None
    segments: Segments | None = None

    @property
    def flat(self) -> list[R]:
        """The rollouts, or the segments that they consist of, in one list."""
        return flat(self.item)

    @property
    def rollouts(self) -> int:
        """The number of rollouts, whatever they consist of."""
        return count_of(self.item, self.segments)

    def _repr_html_(self) -> str:
        facts = f"group {self.uid} of {self.task_name}, {self.status}, reward {units.figure(self.reward)}"
        columns = ("rollout_id", "status", "reward", "finish_reason", "response", "error_msg")
        rows = [[_field(rollout, name) for name in columns] for rollout in self.flat]
        return units.html_table(f"{facts}, staleness {self.staleness}", columns, rows)


def _field(rollout: Any, name: str) -> Any:
    """Return a field of a rollout of any class, None where it has none."""
    return rollout.get(name) if isinstance(rollout, dict) else getattr(rollout, name, None)


@dataclass(frozen=True, slots=True)
class Draw:
    """The parameters of a draw: up to `sizes[task]` groups of each task, of one status, filtered by `where`.

    Nothing is drawn unless there are at least `at_least[task]` groups of each task in it. With `probabilities` each
    group has its `probability` p, and N p as its `weight`, where N is the number of groups that it was drawn from.
    `worker` is the drawing worker's name. `train_step` is the step that will train on the groups; by default the step
    of these tasks' last refresh, if any. Draws of groups that aren't COMPLETED, which are to be regenerated, have no
    default step. Arrays in the fields `deferred` of the rollouts aren't loaded, and are replaced by handles.

    In a mixed draw `replay[task]` of the groups are such as were drawn before, kept or archived, as far as there are
    any, and match `replayed`; the others match `where`, and `at_least` counts these alone.
    """

    sizes: Mapping[str, int]
    status: Status = Status.COMPLETED
    where: Node | None = None
    at_least: Mapping[str, int] = field(default_factory=dict)
    probabilities: bool = False
    worker: str | None = None
    train_step: int | None = None
    deferred: frozenset[str] = frozenset()
    replay: Mapping[str, int] | None = None
    replayed: Node | None = None

    def is_met_by(self, drawn: Mapping[str, int]) -> bool:
        """Return whether these numbers of groups, by task, are enough."""
        return all(drawn.get(task, 0) >= number for task, number in self.at_least.items())


@dataclass(frozen=True, slots=True)
class Leased:
    """Leased groups: the token of the lease, its expiry, and the groups by task.

    Tokens increase: a later lease has a higher one. `until` is in seconds since the epoch, by the store's clock.
    `epoch` is the number of restores before the lease. `train_step` is the step that its draw is recorded for;
    `named_step` is one given by a caller, at the draw or at the acknowledgement. Without it, groups are acknowledged
    for the step of the last refresh. `database` is the store's identity, None if the store wasn't open. `is_part`: some
    groups of the lease aren't in `items`, because they were settled before this handle was made. `saved`: the uids of
    groups that it holds in the place of such ones (`Lease.save`).
    """

    token: int
    until: float
    items: dict[str, list[StorageItem]]
    epoch: int = 0
    train_step: int | None = None
    database: str | None = None
    named_step: int | None = None
    is_part: bool = False
    saved: tuple[int, ...] = ()


def passed_on(lease: Leased, groups: Iterable[tuple[int, int, bool]]) -> list[int]:
    """Return those of these groups, which a lease doesn't hold, that it has lost without acknowledging them.

    Groups are given as uid, `times_sampled` and whether another lease holds them. A group that this lease has
    acknowledged, perhaps in another process, has at least as many draws, less that of a lease which holds it now, as
    this lease has counted.
    """
    draws = {item.uid: item.times_sampled for items in lease.items.values() for item in items}
    return sorted(uid for uid, times_sampled, leased in groups if times_sampled - leased < draws.get(uid, 1))


def lost_to_others(lease: Leased, uids: Collection[int]) -> LeaseLostError:
    """Return the error for groups that a lease should hold but doesn't."""
    return LeaseLostError(
        f"{len(uids)} of the groups of lease {lease.token} are no longer held ({units.some(sorted(uids))}): they were "
        "settled or given back through another handle of the lease, or passed to others when its time was over; "
        "nothing was changed. Acknowledge the others by their uids=, lease for longer (seconds=), or leave the "
        "heartbeat on"
    )


def check_lease(lease: Leased, epoch: int, database: str | None) -> None:
    """Raise LeaseLostError for a lease of another store, and FencedError for one from before the last restore."""
    check_database(lease, database)
    if lease.epoch != epoch:
        raise FencedError(
            f"lease {lease.token} is of the run before the buffer was restored; nothing was changed: its groups are as "
            "they were at the checkpoint"
        )


def check_database(lease: Leased, database: str | None) -> None:
    """Raise LeaseLostError if the lease is of another database than this one, as far as both are known."""
    if None not in (lease.database, database) and lease.database != database:
        raise LeaseLostError(
            f"lease {lease.token} is of the database {lease.database}, and this buffer is in the database {database}; "
            "nothing was changed: open the buffer by the URL that the groups were leased from"
        )


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of a prompt ledger in its dataset.

    `value` is the encoded state from which the dataset continues; `position` is the number of prompts drawn, for
    people; `version` is the number of moves, 0 for a cursor that doesn't exist yet. `epoch` is the number of restores
    before the cursor was read: a restore moves cursors back, and then versions repeat.
    """

    name: str
    version: int = 0
    position: int = 0
    value: bytes = b""
    epoch: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A step checkpoint: the train step, when it was made (seconds since the epoch), and the size of its content."""

    step: int
    created_at: float
    groups: int
    bytes: int


def missing_checkpoint(step: int, steps: list[int]) -> CheckpointError:
    """Return the error for a step without a checkpoint; `steps` have one."""
    clause = f"there are those of the steps {', '.join(map(str, steps))}" if steps else "no checkpoint was made"
    return CheckpointError(f"there is no checkpoint of step {step}; {clause}")


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of an update; UNSET leaves a field unchanged."""

    status: Status | Unset = UNSET
    priority: float | Unset = UNSET
    tags: Tags | Unset | None = UNSET


@dataclass(frozen=True, slots=True)
class Refresh:
    """One refresh: the train step, the statuses of the groups it applies to, and each task's rule.

    If `dropped` is a list, the groups that are removed are added to it after the commit.
    """

    train_step: int
    rules: Mapping[str, ExpiryRule]
    statuses: tuple[Status, ...]
    dropped: list[StorageItem] | None = None
