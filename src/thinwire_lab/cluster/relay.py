"""Cables that delay what they carry: a process of our own that reads frames at one end and writes them at the other.

The kernel's netem would do that too, but many kernels lack it. This takes /dev/net/tun alone. Frames pass whole, as
large as the kernel makes them, so a cable without a rate is no bottleneck.
"""

import fcntl
import mmap
import os
import select
import struct
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from thinwire_lab.cluster.worker import fork

_DEVICE = Path("/dev/net/tun")
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_INFORMATION, _WITH_OFFLOADS = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS_V4 = 0x01, 0x02
_LARGEST = 1 << 17  # bytes of a frame, and what the kernel says about it
_URGENT = -10
_NOW = struct.Struct("d")


def tap(name: str) -> int:
    """Make an interface in the calling thread's namespace, and return the descriptor that is its cable's end.

    It is gone once no process has the descriptor. Raises OSError where /dev/net/tun cannot be used.
    """
    try:
        end = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise OSError(error.errno, f"a latency needs {_DEVICE}: {error.strerror}") from error
    flags = _TAP | _NO_INFORMATION | _WITH_OFFLOADS
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(end, _TUNSETOFFLOAD, _CHECKSUMS | _SEGMENTS_V4)
    return end


@dataclass
class Way:
    """One way through a cable. `delays`: whether it takes time. What is under way is in order of when it is due."""

    source: int
    target: int
    delays: bool
    _under_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, latency: float) -> None:
        """Take in all that the source has."""
        due = time.monotonic() + (latency if self.delays else 0.0)
        try:
            while True:
                self._under_way.append((due, os.read(self.source, _LARGEST)))
        except BlockingIOError:
            return

    def pass_on(self) -> float:
        """Pass on what is due. Return when the next is, in seconds from now; infinite if nothing is under way."""
        while self._under_way:
            left = self._under_way[0][0] - time.monotonic()
            if left > 0:
                return left
            os.write(self.target, self._under_way.popleft()[1])
        return float("inf")


class Relay:
    """Cables between pairs of descriptors that `tap` made; what goes from the first to the second is delayed.

    A process of its own works them. It ends with the calling thread. `latency` in seconds can be set at any time.
    """

    def __init__(self, cables: list[tuple[int, int]], latency: float) -> None:
        self._shared = mmap.mmap(-1, _NOW.size)
        self.latency = latency
        ways = [Way(near, far, True) for near, far in cables] + [Way(far, near, False) for near, far in cables]
        fork(lambda: self._work(ways))

    @property
    def latency(self) -> float:
        """Seconds by which a frame is delayed."""
        found: float = _NOW.unpack_from(self._shared)[0]
        return found

    @latency.setter
    def latency(self, seconds: float) -> None:
        _NOW.pack_into(self._shared, 0, seconds)

    def _work(self, ways: list[Way]) -> None:
        with suppress(PermissionError):
            os.nice(_URGENT)  # or a busy machine adds to the latency
        at = {way.source: way for way in ways}
        poll = select.epoll()
        for source in at:
            poll.register(source, select.EPOLLIN)
        left = float("inf")
        while True:
            for source, _ in poll.poll(None if left == float("inf") else left):
                at[source].take(self.latency)
            left = min(way.pass_on() for way in ways)
