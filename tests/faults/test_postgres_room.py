"""PostgreSQL on a disk that gets full: an error that says so, nothing is lost, and it goes on afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import disks
from tests.faults.figures import Figures
from tests.faults.processes import end, start


@pytest.mark.long
def test_a_full_disk_of_the_server_loses_nothing(tmp_path: Path, figures: Figures) -> None:
    disk, ledger = tmp_path / "disk", tmp_path / "ledger"
    disk.mkdir()
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # the server isn't root
    assert end(start(disks.postgres_on_a_small_disk, ledger, str(disk)), ledger, 300) == 0
    disks.check(ledger, figures, "postgresql://")
