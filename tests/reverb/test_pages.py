"""docs/reverb.md names what there is."""

from __future__ import annotations

from replaybuf import reverb
from tests.pages import DOCS


def test_the_names_side_by_side_are_there() -> None:
    """Every part that the page says is the same."""
    named = (DOCS / "reverb.md").read_text("utf-8")
    for module in (reverb.selectors, reverb.rate_limiters):
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__ and not name.endswith("Policy"):
                assert f"`{name}`" in named or f".{name}`" in named or name in ("Selector", "RateLimiter")
