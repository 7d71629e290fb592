"""Network namespaces around a bridge, each on a cable of limited rate, or several on one, as an island's machines are.

Linux only; gone with its processes.
"""

import ctypes
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinwire_lab.cluster.link import Rate, interface_bytes
from thinwire_lab.cluster.relay import Relay, tap

INTERFACE = "eth0"
_MIDDLE = "bridge"

_FRAME = 1514  # bytes
_QUEUE = 64 * 2**20  # bytes; uses memory only as it fills, and a short queue would drop packets
_LIFTED = 2**32 - 1  # bytes per second: the most that tbf's field holds, and more than a machine can move
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_LOOPBACK_INDEX = 1
_LINK_SCOPE, _KERNEL_PROTOCOL = 253, 2
_PINGS, _PATIENCE = 10, 20.0  # a number, seconds


class Unavailable(RuntimeError):  # noqa: N818 - it reads better where it is raised and caught
    """Namespaces are not available here; the message says why."""


class Namespace:
    """An anonymous network namespace, gone with the last process that refers to it. Making one moves into it."""

    def __init__(self) -> None:
        from pyroute2 import IPRoute

        _system_call("unshare", _CLONE_NEWNET)
        self.descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.netlink: Any = IPRoute()
        # the first request opens the socket; it stays in this namespace wherever the thread goes
        self.netlink.link("set", index=_LOOPBACK_INDEX, state="up")

    def enter(self) -> None:
        """Move the calling thread here; processes that it starts begin here too."""
        _system_call("setns", self.descriptor, _CLONE_NEWNET)

    def index(self, interface: str) -> int:
        """Return the number the kernel gave an interface."""
        return int(self.netlink.link_lookup(ifname=interface)[0])


class Star:
    """Namespaces around a bridge. In the i-th, ``eth0`` has `address(i)` and reaches every other address.

    Each cable carries `rate` both ways at once. With `island` above 1, so many neighbours have a bridge of their own
    and share its cable to the middle; between them nothing is limited. What `rate` says of latency is between any two
    that do not share a cable, one way. Call it in a process with one thread. If it raises Unavailable, the calling
    thread is left in a useless namespace.
    """

    def __init__(self, size: int, rate: Rate | None, island: int = 1) -> None:
        with _explaining():
            self._hub, self._island = _first_namespace(), island
            self._add_bridge(_MIDDLE)
            self._spokes = [Namespace() for _ in range(size)]
            self._limited = _Delaying(rate.latency) if rate and rate.latency else _Direct()
            single = [end for number in range(size) for end in self._join(number)]
            shared = [end for number in range(size // island) for end in self._moor(number)] if island > 1 else []
            self._ends = shared or single
            self._limited.ready()
            self.shape(rate)

    def shape(self, rate: Rate | None) -> None:
        """Limit every cable to `rate`, or lift the limit; takes effect at once and drops nothing.

        Lifted, cables do not delay either; else they do as they have from the start.
        """
        speed = _LIFTED if rate is None else rate.bits_per_second // 8
        for netlink, index in self._ends:
            netlink.tc("replace", "tbf", index, rate=speed, burst=_burst(speed), limit=_QUEUE)
        self._limited.delay(rate is not None)

    def ping(self) -> float:
        """Return the least seconds of some round trips between the first and the last spoke, empty as the cables are.

        Leaves the calling thread in another namespace.
        """
        ends = []
        for number in (0, len(self._spokes) - 1):
            self._spokes[number].enter()
            ends.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            ends[-1].bind((address(number), 0))
            ends[-1].settimeout(_PATIENCE)
        (first, last), taken = ends, []
        for _ in range(1 + _PINGS):
            began = time.perf_counter()
            first.sendto(b"ping", last.getsockname())
            last.sendto(*last.recvfrom(8))
            first.recv(8)
            taken.append(time.perf_counter() - began)
        return min(taken[1:])  # the first also asks for addresses

    def enter(self, number: int) -> None:
        """Move the calling thread to a spoke. From there `interface_bytes` counts on the cable that is limited."""
        (self._hub if self._island > 1 else self._spokes[number]).enter()
        interface_bytes()
        self._spokes[number].enter()

    def interface(self, number: int) -> str:
        """Return the name of the spoke's own end of the cable that is limited."""
        return INTERFACE if self._island == 1 else f"uplink{number // self._island}"

    def _join(self, number: int) -> Iterator[tuple[Any, int]]:
        """Lay a cable to a spoke, and yield both its ends."""
        hub, spoke, port = self._hub, self._spokes[number], f"port{number}"
        cables = self._limited if self._island == 1 else _Direct()
        cables.lay(spoke, INTERFACE, hub, port)
        self._plug(port, _MIDDLE if self._island == 1 else self._bridge_of(number // self._island))
        _configure(spoke, address(number))
        yield hub.netlink, hub.index(port)
        yield spoke.netlink, spoke.index(INTERFACE)

    def _moor(self, number: int) -> Iterator[tuple[Any, int]]:
        """Lay a cable from an island's bridge to the middle, and yield both its ends."""
        near, far = f"uplink{number}", f"mooring{number}"
        self._limited.lay(self._hub, near, self._hub, far)
        self._plug(near, self._bridge_of(number))
        self._plug(far, _MIDDLE)
        yield self._hub.netlink, self._hub.index(near)
        yield self._hub.netlink, self._hub.index(far)

    def _bridge_of(self, island: int) -> str:
        name = f"island{island}"
        if not self._hub.netlink.link_lookup(ifname=name):
            self._add_bridge(name)
        return name

    def _add_bridge(self, name: str) -> None:
        self._hub.netlink.link("add", ifname=name, kind="bridge")
        self._hub.netlink.link("set", index=self._hub.index(name), state="up")

    def _plug(self, end: str, bridge: str) -> None:
        self._hub.netlink.link("set", index=self._hub.index(end), master=self._hub.index(bridge), state="up")


class _Direct:
    """The kernel's own cables, which take no time."""

    def lay(self, outside: Namespace, near: str, inside: Namespace, far: str) -> None:
        """Join two namespaces by interfaces of these names. The calling thread may be left in one of them."""
        inside.netlink.link("add", ifname=far, kind="veth", peer={"ifname": near, "net_ns_fd": outside.descriptor})

    def ready(self) -> None:
        """Take the cables into service, once all are laid."""

    def delay(self, on: bool) -> None:
        """Have them delay, if they do, what comes from outside; or not."""


class _Delaying(_Direct):
    """Cables that a relay works."""

    def __init__(self, latency: float) -> None:
        self._latency = latency
        self._ends: list[tuple[int, int]] = []

    def lay(self, outside: Namespace, near: str, inside: Namespace, far: str) -> None:
        ends = []
        for namespace, name in ((outside, near), (inside, far)):
            namespace.enter()
            ends.append(tap(name))
        self._ends.append((ends[0], ends[1]))

    def ready(self) -> None:
        self._relay = Relay(self._ends, self._latency)

    def delay(self, on: bool) -> None:
        self._relay.latency = self._latency if on else 0.0


def address(number: int) -> str:
    """Return the IPv4 address of a spoke."""
    return f"10.77.0.{number + 1}"


def _configure(spoke: Namespace, own: str) -> None:
    index = spoke.index(INTERFACE)
    spoke.netlink.addr("add", index=index, address=own, prefixlen=24)
    spoke.netlink.link("set", index=index, state="up")
    # Reno slows down only if packets are lost, and none are: so the shaper alone sets the rate
    reno = {"scope": _LINK_SCOPE, "proto": _KERNEL_PROTOCOL, "metrics": {"cc_algo": "reno"}}
    spoke.netlink.route("replace", dst="10.77.0.0/24", oif=index, prefsrc=own, **reno)


def _burst(speed: int) -> int:
    """Return how many bytes may pass at once: 0.5 ms of the rate, and 1 ms from 1 Gbit/s on; 2 frames at least.

    It must cover late timers, but payloads up to this size pass for free. In 1 ms, TCP's 64 kB packets fit whole.
    """
    seconds = 0.5e-3 * (1 + min(speed / 125e6, 1.0))
    return max(2 * _FRAME, int(speed * seconds))


def _first_namespace() -> Namespace:
    try:
        return Namespace()
    except PermissionError:
        _become_root()
        return Namespace()


def _become_root() -> None:
    """Enter a user namespace in which the user is root."""
    user, group = os.geteuid(), os.getegid()
    _system_call("unshare", _CLONE_NEWUSER)
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"0 {user} 1")
    (own / "gid_map").write_text(f"0 {group} 1")


def _system_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@contextmanager
def _explaining() -> Iterator[None]:
    """Turn any error here into Unavailable."""
    if sys.platform != "linux":
        raise Unavailable("they need Linux")
    try:
        from pyroute2 import NetlinkError
    except ImportError as error:
        raise Unavailable(f"pyroute2 cannot be imported: {error}") from error
    try:
        yield
    except (OSError, NetlinkError) as error:
        raise Unavailable(error.args[-1]) from error
