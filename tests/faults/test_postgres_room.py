"""PostgreSQL on a disk that gets full: an error that says so, nothing is lost, and it goes on afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import disks
from tests.faults.figures import Figures
from tests.faults.ledger import entries, numbers
from tests.faults.processes import end, start


@pytest.mark.long
def test_a_full_disk_of_the_server_loses_nothing(tmp_path: Path, figures: Figures) -> None:
    disk, ledger = tmp_path / "disk", tmp_path / "ledger"
    disk.mkdir()
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # the server isn't root
    assert end(start(disks.postgres_on_a_small_disk, ledger, str(disk)), ledger, 300) == 0
    if refusal := entries(ledger, "not-permitted"):
        pytest.skip(f"mounting is refused: {refusal[0]}")
    full, put = entries(ledger, "full"), numbers(ledger, "put")
    found = numbers(ledger, "take") + numbers(ledger, "left")
    figures.add(
        faults=len(full), groups=len(put), lost=len(set(put) - set(found)), doubled=len(found) - len(set(found))
    )
    assert len(full) >= 2
    assert all("postgresql://" in message and "free some space" in message for message in full)
    assert len(put) > 20
    assert sorted(found) == sorted(set(put))
