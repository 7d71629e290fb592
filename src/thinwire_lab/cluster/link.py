"""How fast a link is, and how many bytes went over it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from thinwire.exchanges import Link
from thinwire_lab.inputs import BadInput, parse_link, rate_text

INTERFACE_VARIABLE = "THINWIRE_INTERFACE"
"""Environment variable with the interface's name, set in workers that have a link, their own or their island's."""
LATENCY_VARIABLE = "THINWIRE_LATENCY"
"""Environment variable with the seconds from one worker to another, set in workers that have a link."""

_SLOWEST, _FASTEST = 8_000, 32_000_000_000  # bits per second; the kernel's field ends at 34e9
_FARTHEST = 5.0  # seconds


@dataclass(frozen=True)
class Rate:
    """The rate of a link in bits per second; all headers count, including Ethernet's.

    latency: seconds from one worker to another, which is half of what a ping takes.
    """

    bits_per_second: int
    latency: float = 0.0

    def __str__(self) -> str:
        """Return it as in ``100 Mbit/s``, or ``100 Mbit/s and 50 ms``."""
        rate = rate_text(self.bits_per_second, "g")
        return f"{rate} and {1e3 * self.latency:g} ms" if self.latency else rate


def parse_rate(text: str) -> Rate | None:
    """Read ``100mbit``, ``1.5 Gbit/s``, ``300kbps`` (kilobits), ``10mbit/50ms`` or ``none``.

    Raises BadInput for anything else.
    """
    if text.strip().lower() == "none":
        return None
    try:
        found = parse_link(text)
    except ValueError:
        found = Link(latency=0.0, bandwidth=0.0)
    bits = 8 * found.bandwidth
    if not (_SLOWEST <= bits <= _FASTEST and found.latency <= _FARTHEST):
        raise BadInput(
            f"link rate {text!r}: expected 8kbit to 32gbit, such as 100mbit or 1.5gbit, with up to {_FARTHEST:g} s of "
            "latency behind it if wanted, as in 10mbit/50ms; or none"
        )
    return Rate(round(bits), found.latency)


class Traffic(NamedTuple):
    """What was sent on an interface so far; bytes include all headers, Ethernet's too."""

    nbytes: int
    packets: int


def interface_bytes() -> Traffic | None:
    """Return what this worker has sent on its link, or None if it has none. Takes about 0.3 ms.

    The first call opens the counters, in the namespace of the calling thread; later ones read them from any namespace.
    """
    name = os.environ.get(INTERFACE_VARIABLE)
    return None if name is None else _counters(name).read()


class _Counters:
    """Those of an interface."""

    def __init__(self, name: str) -> None:
        from pyroute2 import IPRoute

        self._netlink = IPRoute()
        self._index = self._netlink.link_lookup(ifname=name)[0]

    def read(self) -> Traffic:
        # unlike /proc/net/dev, the shaper charges merged segments for a header each
        (shaper,) = self._netlink.get_qdiscs(index=self._index)
        sent = dict(shaper.get_attr("TCA_STATS"))
        return Traffic(sent["bytes"], sent["packets"])


_counters = cache(_Counters)


Wire = Callable[[], tuple[int, int] | None]
"""Returns the bytes and packets sent so far on this worker's interface, or None where they cannot be counted."""

_QUIET, _LONGEST_DRAIN = 0.02, 100  # seconds, readings
_ROUND_TRIPS = 2.5  # in latencies: who waits for an answer sends nothing meanwhile


@dataclass
class Meter:
    """Counts what this worker sends. Where the interface has no counters, it adds up the declared bytes instead."""

    wire: Wire = interface_bytes
    total: float = 0.0
    _last: tuple[int, int] | None = None

    def skip(self) -> None:
        """Leave out what was sent since the last reading."""
        self._last = self._at_rest()

    def read(self, declared: float) -> dict[str, int]:
        """Add what was sent since the last reading, and return its bytes and packets if they were counted."""
        last, self._last = self._last, self.wire()
        if last is None or self._last is None:
            self.total += declared
            return {}
        nbytes, packets = self._last[0] - last[0], self._last[1] - last[1]
        self.total += nbytes
        return {"measured": nbytes, "packets": packets}

    def drain(self) -> dict[str, int]:
        """Wait until the interface is quiet, and return the rest of a step: what was sent since the last reading.

        A collective ends for a rank once it has received everything; what it sent may still be queued.
        """
        self._at_rest()
        return self.read(0.0)

    def _at_rest(self) -> tuple[int, int] | None:
        before, now = None, self.wire()
        for _ in range(_LONGEST_DRAIN):
            if now == before:
                break
            time.sleep(_QUIET + _ROUND_TRIPS * float(os.environ.get(LATENCY_VARIABLE, 0.0)))
            before, now = now, self.wire()
        return now
