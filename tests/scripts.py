"""Scripts of tests that run in a process of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap


def run(script: str, *arguments: object, expect: int = 0, send: signal.Signals | None = None) -> str:
    """Run a script in which every warning is an error; it has to end by itself, without a word on stderr."""
    text = textwrap.dedent(
        """
        import asyncio, gc, multiprocessing, os, pickle, sys, threading, time
        from replaybuf import *
        from tests.stores import *
        url = sys.argv[1]
        """
    ) + textwrap.dedent(script)
    command = [sys.executable, "-W", "error", "-c", text, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if send is not None:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(send)
    try:
        out, problems = process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert problems == "" or send is not None
    assert process.returncode == expect
    return out + (problems if send is not None else "")
