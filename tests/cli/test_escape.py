"""Texts in a buffer can't drive the terminal."""

from __future__ import annotations

import json
import os
import pty
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.cli.output import fit
from replaybuf.common.redact import escape, escape_json, escape_line
from tests.cli.conftest import run

UNSAFE = ["\x1b", "\x07", "\x00", "\r", "\x7f", "\x9b", "\u202e", "\u2066", "\ufeff", "\u2028", "\U000e0041", "\ud800"]


@pytest.mark.parametrize("character", UNSAFE)
def test_unsafe_characters_become_escapes(character: str) -> None:
    shown = escape(f"a{character}b")
    assert shown.isascii()
    assert shown.isprintable()
    assert shown.startswith("a\\")


@pytest.mark.parametrize("text", ["plain", "[red]x[/red]", "\\nabla", "你好", "é", "👩‍🚀", "می‌خواهم", "x²"])
def test_all_else_stays(text: str) -> None:
    assert escape(text) == text


def test_a_line_has_no_newlines() -> None:
    assert escape_line(" a\n   b\r\nc\x1b ") == "a b c\\x1b"


@given(st.text())
def test_json_keeps_its_meaning(text: str) -> None:
    encoded = escape_json(json.dumps([text], ensure_ascii=False))
    assert json.loads(encoded) == [text]
    assert not any(character in encoded for character in UNSAFE)


@pytest.mark.parametrize(
    "command",
    [
        *(("stats",), ("ls",), ("show", "1"), ("show", "1", "--full"), ("why", "--size", "9")),
        ("sql", "SELECT prompt, tags, task_name FROM groups"),
    ],
)
@pytest.mark.parametrize("format", ["", "--format=json"])
def test_no_command_prints_an_unsafe_character(hostile: str, command: tuple[str, ...], format: str) -> None:
    args = [command[0], hostile, *command[1:], *([format] if format else [])]
    stdout = run(*args).stdout
    assert not [character for character in UNSAFE if character in stdout]
    assert "not markup" in stdout


def on_a_terminal(*args: str, columns: int = 80) -> str:
    """What the program prints on a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), PYTHONPATH=str(Path(__file__).parents[2]))
        os.execv(sys.executable, [sys.executable, "-m", "replaybuf", *args])
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    return shown.decode()


@pytest.mark.parametrize("format", ["--format=json", "--format=csv"])
@pytest.mark.parametrize("hostile", ["sqlite"], indirect=True)
def test_a_terminal_gets_no_escapes_in_any_format(hostile: str, format: str) -> None:
    shown = on_a_terminal("ls", hostile, format)
    assert "not markup" in shown
    assert not [character for character in UNSAFE if character in shown.replace("\r\n", "\n")]


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
def test_a_terminal_gets_colours(filled: str) -> None:
    assert "\x1b[32mcompleted" in on_a_terminal("ls", filled)


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
@pytest.mark.parametrize("columns", [40, 100])
def test_sentences_are_wrapped_at_words(filled: str, columns: int) -> None:
    words = run("why", filled, "math", "--size", 64).stdout.splitlines()[0].split()
    lines = on_a_terminal("why", filled, "math", "--size", "64", columns=columns).splitlines()
    shown = "\n".join(lines).partition("\n\n")[0]
    assert shown.split() == words
    assert max(map(len, shown.splitlines())) <= columns


@given(
    st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=12),
    st.integers(20, 300),
)
def test_numbers_are_never_cut(columns: list[tuple[int, bool]], available: int) -> None:
    natural, texts = [width for width, _ in columns], [is_text for _, is_text in columns]
    _, widths = fit(natural, texts, available)
    for width, wanted, is_text in zip(widths, natural, texts, strict=True):
        assert width <= wanted if is_text else width == wanted
        assert width >= min(wanted, 10)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=5), st.integers(80, 300))
def test_texts_give_way_until_the_table_fits(natural: list[int], available: int) -> None:
    gap, widths = fit(natural, [True] * len(natural), available)
    assert sum(widths) + gap * (len(widths) - 1) <= available
