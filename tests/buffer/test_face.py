"""The public face: what is above the buffer asks the buffer, and all puts and draws take the same options."""

import ast
import inspect
from pathlib import Path

import pytest

import replaybuf
from replaybuf import Lease, Prompt, ReplayBuffer
from replaybuf.buffer.drawing import DrawOptions, DrawRequest
from replaybuf.buffer.putting import Putting

ROOT = Path(replaybuf.__file__).parent
ABOVE = [
    path
    for name in (
        "sync",
        "produce",
        "integrations/chunks",
        "integrations/reverb",
        "demo",
        "cli",
        "doctor",
        "config.py",
    )
    for path in sorted([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
]


@pytest.mark.parametrize("path", ABOVE, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_above_the_buffer_reaches_through_it(path: Path) -> None:
    """To its storage; modules of `replaybuf.storage` are another thing."""
    tree = ast.parse(path.read_text())
    through = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "storage"]
    assert through == []


def test_all_puts_take_the_same_options() -> None:
    for put in (ReplayBuffer.put, ReplayBuffer.put_many, Lease.finish, Lease.save, Prompt.finish, Putting.prepare):
        assert "Unpack[PutOptions]" in str(inspect.signature(put).parameters["options"].annotation)


def test_all_draws_take_the_same_options() -> None:
    """Those of `DrawOptions`, whose defaults are written once."""
    own = {"sizes", "group_status", "statuses", "worker", "beta", "deferred"}
    assert DrawOptions.__optional_keys__ == set(inspect.signature(DrawRequest.checked).parameters) - own
    for draw in (ReplayBuffer.get, ReplayBuffer.take_batch, ReplayBuffer.sample, ReplayBuffer.lease_batch):
        assert "Unpack[DrawOptions]" in str(inspect.signature(draw).parameters["options"].annotation)
