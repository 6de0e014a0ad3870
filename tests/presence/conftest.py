"""Beats and waits that take tenths of a second."""

from __future__ import annotations

import pytest

from replaybuf.buffer import wait_reports
from replaybuf.storage.sql.tasks import heartbeats, sweeper


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats and waits of tenths of a second."""
    monkeypatch.setattr(heartbeats, "_SOON_SECONDS", 0.02)
    monkeypatch.setattr(heartbeats, "_NEWS_SECONDS", 0.02)
    monkeypatch.setattr(heartbeats, "_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.02)
    monkeypatch.setattr(wait_reports, "SHOW_SECONDS", 0.05)
    monkeypatch.setattr(wait_reports, "REASON_SECONDS", 0.05)
