"""docs/payloads.md has the figures of the code."""

from __future__ import annotations

from replaybuf.segments.places import PAYLOAD_THRESHOLD
from replaybuf.storage.sql.tasks.open_segments import SEGMENT_BYTES
from tests.pages import DOCS

TEXT = (DOCS / "payloads.md").read_text("utf-8")


def test_the_page_has_the_sizes_of_the_code() -> None:
    assert f"{SEGMENT_BYTES >> 20} MiB" in TEXT
    assert f"({PAYLOAD_THRESHOLD >> 10} KiB)" in TEXT
