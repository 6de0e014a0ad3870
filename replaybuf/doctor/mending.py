"""All repairs of a database in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replaybuf.doctor import check_file, check_places, mend_counts, mend_groups, mend_payloads, mend_schema
from replaybuf.doctor.check_schema import find_revision
from replaybuf.doctor.examine import FAILURES, text_of
from replaybuf.doctor.findings import CheckContext, Severity
from replaybuf.errors import SchemaError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.inspection.writer import Writer, open_writer

#: A repair mends what is safe to mend, in one transaction without any other writer, and says what it did. It finds out
#: by itself what is wrong, because that may have changed since the check.
Repair = Callable[[Transaction, CheckContext], Sequence[str]]

_OF_FILES: dict[str, Repair] = {"integrity": mend_schema.repair_integrity, "texts": mend_payloads.repair_texts}
#: The repairs, by the name of their check. Counts come last: other repairs set groups aside, or bring them back.
_REPAIRS: dict[str, Repair] = {
    "indexes": mend_schema.repair_indexes,
    "views": mend_schema.repair_views,
    "lanes": mend_groups.repair_lanes,
    "leased groups": mend_groups.repair_leased,
    "payloads": mend_groups.repair_payloads,
    "leaked payloads": mend_groups.repair_leaked,
    "garbage": mend_groups.repair_garbage,
    "segments": check_places.repair_segments,
    "uids": mend_counts.repair_uids,
    "checksums": mend_payloads.repair_checksums,
    "leases": mend_counts.repair_leases,
    "places": check_places.repair_places,
    "counts": mend_counts.repair_counts,
}


def repair(reader: Reader, context: CheckContext) -> list[str]:
    """Run the repairs that are safe, each in an exclusive write transaction. Return what was done.

    `context` has the payloads that `examine` found damaged. No group is deleted, and no payload that one needs. Raises
    SchemaError if the schema isn't that of this version.
    """
    revision = reader.read_any(lambda tx: find_revision(tx, context))
    if any(finding.level != Severity.OK for finding in revision):
        raise SchemaError(f"{reader.where} was left as it is: {revision[0].text}; {revision[0].mend}")
    done: list[str] = []
    with open_writer(reader) as writer:
        for name, mend in ((_OF_FILES if reader.path else {}) | _REPAIRS).items():
            done += _mend(writer, name, mend, context)
        if reader.path and check_file.is_log_large(context):
            emptied = writer.empty_log()
            done.append("emptied the log" if emptied else "could not empty the log: another process reads from it")
    return done


def _mend(writer: Writer, name: str, mend: Repair, context: CheckContext) -> Sequence[str]:
    try:
        return writer.write(lambda tx: mend(tx, context))
    except FAILURES as error:
        return [f"could not mend {name}: {text_of(error)}"]
