"""Checks of payloads: each is read and compared with its checksum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replaybuf.doctor.finding import Finding, Look, fine, groups, problem, repairable, some, warning
from replaybuf.doctor.groups import FORGET, said
from replaybuf.storage.sql.inspection.checkup import payloads
from replaybuf.storage.sql.inspection.reader import Reader

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

NAME = "checksums"

#: How many payloads are read with `--quick`.
SAMPLE = 200


def look_at_checksums(reader: Reader, look: Look) -> list[Finding]:
    """Read and verify payloads, in several transactions: a long one would hold back cleaning up.

    Damaged groups are kept in `look.damaged`.
    """
    named = reader.read(payloads.list_payloads)
    chosen = named[:: len(named) // SAMPLE + 1] if look.quick else named
    damaged: dict[int, str] = {}
    done = 0
    for batch in payloads.in_batches(chosen):
        damaged |= payloads.find_damage(reader, batch)
        done += len(batch)
        look.tell(done, len(chosen))
    look.damaged |= damaged
    what = f"{len(chosen):,} of {groups(len(named))}" if len(chosen) < len(named) else groups(len(named))
    note = f" (--quick: {len(chosen):,} of {len(named):,} read)" if len(chosen) < len(named) else ""
    if not damaged:
        return [fine(NAME, f"{what} read, all payloads as they were written")]
    found = reader.read(lambda tx: payloads.sort_damaged(tx, damaged.keys()))
    return _findings(found, damaged, note)


def _findings(found: payloads.Damaged, why: dict[int, str], note: str) -> list[Finding]:
    findings = []
    if new := found.new:
        named = some([f"{uid} ({why[uid]})" for uid in new], 3)
        findings.append(repairable(NAME, f"the payloads of {groups(len(new))} are damaged: {named}{note}"))
    if aside := found.aside:
        text = f"the payloads of {groups(len(aside))} are damaged, set aside already: {some(aside)}{note}"
        findings.append(warning(NAME, text, FORGET))
    if kept := found.kept:
        text = f"the payloads of {groups(len(kept))} that only checkpoints have are damaged: {some(kept)}{note}"
        findings.append(problem(NAME, text, "buffer.drop_checkpoint(step), or restore without them"))
    return findings


def repair_checksums(tx: Transaction, look: Look) -> Sequence[str]:
    """Set aside groups that were found damaged, and still are."""
    return said(payloads.put_damaged_aside(tx, look.damaged.keys()))
