"""Hosts of one machine: network namespaces, each at the end of a cable with delay, loss and cuts.

A cable is a pair of TUN devices, one here and one in a namespace of its own, and a process that carries packets from
one to the other, as netem would, which not every kernel has. So TCP meets what it meets on a network: it sends again
what was lost, waits longer each time, and begins slowly after a pause. It needs root and `ip` (iproute2).
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_TUNSETIFF, _TUN, _NO_PACKET_INFO = 0x400454CA, 0x0001, 0x1000
_LARGEST = 65_536
_QUEUE = 10_000  # packets
_ROUND = 64  # packets that are read from one side before the other one is looked at


class NoCableError(Exception):
    """This machine makes no cables; the message says why."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What a cable does: `delay` seconds each way, and the part `loss` of the packets is lost.

    `there` and `back` say whether packets to the server pass, and packets from it.
    """

    delay: float = 0.0
    loss: float = 0.0
    there: bool = True
    back: bool = True


def ip(*arguments: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Host:
    """A namespace at the end of a cable. `server` is this machine's address on it, where a server may listen."""

    _numbers = itertools.count(1)

    def __init__(self, subnet: str) -> None:
        number = next(self._numbers)
        mark = f"{os.getpid() % 100_000}x{number}"
        self.space, self._near, self._far = f"rbhost{mark}", f"rbn{mark}", f"rbf{mark}"
        self.server, self.address = f"{subnet}.{number}.1", f"{subnet}.{number}.2"
        self._weather = Weather()
        self._carrier: Any = None

    def make(self, stack: ExitStack) -> None:
        """Lay the cable; it is gone with the stack. Raises NoCableError."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NoCableError("network namespaces need root and the program ip (iproute2)")
        try:
            ends = [_tun(self._near), _tun(self._far)]
        except OSError as error:
            raise NoCableError(f"this machine makes no TUN devices: {error}") from error
        try:
            ip("netns", "add", self.space)
            stack.callback(ip, "netns", "delete", self.space)
            ip("link", "set", self._far, "netns", self.space)
            for namespace, device, own, other in (
                ((), self._near, self.server, self.address),
                (("-n", self.space), self._far, self.address, self.server),
            ):
                ip(*namespace, "address", "add", own, "peer", other, "dev", device)
                ip(*namespace, "link", "set", device, "txqueuelen", str(_QUEUE), "up")
            ip("-n", self.space, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            raise NoCableError(f"this machine makes no network namespaces: {error.stderr.decode().strip()}") from error
        command = [sys.executable, "-m", "tests.hosts.cable", *map(str, ends)]
        self._carrier = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.PIPE, cwd=_ROOT)
        stack.callback(self._end)
        for end in ends:
            os.close(end)

    def _end(self) -> None:
        self._carrier.stdin.close()
        self._carrier.wait(10)

    def set(self, **changes: Any) -> None:
        """Change the weather from now on."""
        self._weather = Weather(**{**asdict(self._weather), **changes})
        self._carrier.stdin.write(json.dumps(asdict(self._weather)).encode() + b"\n")
        self._carrier.stdin.flush()

    def cut(self) -> None:
        """Let no packet pass, in either direction."""
        self.set(there=False, back=False)

    def mend(self) -> None:
        """Let all packets pass."""
        self.set(there=True, back=True)

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs another one on this host."""
        return ["ip", "netns", "exec", self.space, *arguments]


_ROOT = Path(__file__).parents[2]


def hosts(count: int, stack: ExitStack) -> list[Host]:
    """Return so many hosts with their cables. Raises NoCableError."""
    subnet = f"10.{random.randint(128, 254)}"
    new_hosts = [Host(subnet) for _ in range(count)]
    for host in new_hosts:
        host.make(stack)
    return new_hosts


def _tun(name: str) -> int:
    from fcntl import ioctl

    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_PACKET_INFO))
    except OSError:
        os.close(end)
        raise
    os.set_inheritable(end, True)
    return end


# The process that carries packets


def carry(near: int, far: int, control: int) -> None:
    """Carry packets between two devices until the end of `control`, of which each line is the weather from then on."""
    weather, pending = Weather(), b""
    on_the_way: list[tuple[float, int, int, bytes]] = []
    numbers, chance = itertools.count(), random.Random(0)
    while True:
        wait = None if not on_the_way else max(0.0, on_the_way[0][0] - time.monotonic())
        ready = select.select((near, far, control), (), (), wait)[0]
        if control in ready:
            if not (command := os.read(control, 4096)):
                return
            *lines, pending = (pending + command).split(b"\n")
            if lines:
                weather = Weather(**json.loads(lines[-1]))
        for end, other, passes in ((near, far, weather.back), (far, near, weather.there)):
            for packet in _packets(end) if end in ready else ():
                if passes and chance.random() >= weather.loss:
                    heapq.heappush(on_the_way, (time.monotonic() + weather.delay, next(numbers), other, packet))
        now = time.monotonic()
        while on_the_way and on_the_way[0][0] <= now:
            _, _, end, packet = heapq.heappop(on_the_way)
            with suppress(OSError):  # a device that is full, or gone, loses it
                os.write(end, packet)


def _packets(end: int) -> Sequence[bytes]:
    packets = []
    with suppress(OSError):
        for _ in range(_ROUND):
            packets.append(os.read(end, _LARGEST))
    return packets


if __name__ == "__main__":
    carry(int(sys.argv[1]), int(sys.argv[2]), 0)
