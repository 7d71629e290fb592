"""What workers ask a TCPStore: who else is there, and, where not all of them agree in time, what was decided.

Who proposes first decides: the store sets a key once. One that was started anew has forgotten what it had, so workers
take a decision from it only if more than half of them are there.

Why not by torch's own client? If the host is gone it waits for ever, or logs stack traces, and a process that ends
while it tries to connect is aborted. One command of torch's protocol is enough here: "set this key if it has that".
"""

import json
import logging
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, final

from thinwire.errors import StateError
from thinwire.integrations.workers.awake import monotonic

T = TypeVar("T")
_log = logging.getLogger("thinwire")
_PATIENCE = 3.0  # seconds for an answer
_NOTHING, _EVERYWHERE = "?", "0.0.0.0"  # which the store's host may pass for its own, and listens at
_VALIDATE, _COMPARE_SET, _MAGIC = 0, 2, 0x3C85F7CE  # of TCPStoreBackend.hpp
_LIMIT, _DIGITS = 1 << 26, 12  # bytes of an answer; of a life's number


class StoreError(ConnectionError):
    """The store does not answer, or must not decide."""


def found_address(store: object) -> tuple[str, int, str]:
    """Return a store's host and port, and what its keys begin with. Raises ValueError for what is none.

    It is `tcp://host:port`, a TCPStore of torch, also within a PrefixStore, or `env://`, the one that torchrun serves.
    """
    store, prefix = _unwrapped(store)
    text, said = str(store), f"store is {store!r}"
    if text == "env://":
        master, port = (os.environ.get(f"MASTER_{name}", "") for name in ("ADDR", "PORT"))
        run = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
        text, prefix = f"tcp://{master}:{port}", ".".join(run)
        said = f"{said}, MASTER_ADDR {master!r} and MASTER_PORT {port!r}"
    elif not isinstance(store, str):
        text = f"tcp://{getattr(store, 'host', '')}:{getattr(store, 'port', '')}"
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0
    if scheme != "tcp" or not host or set(host) & set(":/@ ") or not 0 < number < 1 << 16:
        raise ValueError(
            f"{said}; expected the address of a TCPStore, such as tcp://10.0.0.1:29400, by a name or IPv4 address and "
            "a port below 65536, or a TCPStore, or env:// under torchrun, which sets MASTER_ADDR and MASTER_PORT"
        )
    return host, number, prefix


def _unwrapped(store: Any) -> tuple[Any, str]:
    """Return what a PrefixStore has within, and what it puts before keys, which only the list of these tells."""
    inner, key = store, uuid.uuid4().hex
    while within := getattr(inner, "underlying_store", None):
        inner = within
    if inner is store or not hasattr(inner, "list_keys"):  # older torches
        return inner, ""
    store.set(key, "")
    found = next(each for each in inner.list_keys() if each.endswith(key))
    store.delete_key(key)
    return inner, found.removesuffix(key)


@final
class Directory:
    """A connection to a store, made anew when it is lost. Each call takes seconds at most.

    All its keys begin with `run`: a worker with another one finds nothing. `patience`: seconds for which it may
    be lacking. `life`: that of the store with which this worker has registered; it is greater each time that one is
    started anew.
    """

    def __init__(self, store: object, run: str = "", patience: float = 300.0) -> None:
        self._host, self._port, prefix = found_address(store)
        self._store = store  # which serves as long as somebody holds it
        self.address = f"tcp://{self._host}:{self._port}"
        self._prefix = f"/{prefix}{run}/"
        self._connection: _Connection | None = None
        self._turn = threading.Lock()
        self.life = self._trusted = ""
        self._closed, self._away = False, 0.0
        self._why = self._said = ""  # why it does not answer, and for what it was said to be needed
        self._lacking, self.patience = 0.0, patience

    @property
    def own_host(self) -> str:
        """The address of this machine, as the store's host sees it; on that host, all its own. Raises StoreError."""
        if self._host == _EVERYWHERE:
            return self._host
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self._host, self._port))
            except OSError as error:
                raise StoreError(f"the store's host {self._host!r} cannot be reached from here: {error}") from error
            return probe.getsockname()[0]

    def reached(self, host: str) -> str:
        """Return where this machine reaches another worker that listens at `host`."""
        return self._host if host == _EVERYWHERE else host

    @property
    def away(self) -> float:
        """For how many seconds it has not answered: 0 if it does."""
        return monotonic() - self._away if self._away else 0.0

    def close(self) -> None:
        """Let go of the connection."""
        self._closed = True
        if connection := self._connection:
            connection.close()

    def register(self, card: Mapping[str, Any], patience: float = 0.0) -> list[dict[str, Any]]:
        """Put up this worker's card, and try for so many seconds. Return those of workers before it, dead ones too.

        Raises:
            StoreError: If the store does not answer.
        """

        def work(swap: Swap) -> list[dict[str, Any]]:
            began = f"{int(self.life[:_DIGITS] or 0) + 1:0{_DIGITS}} {uuid.uuid4().hex}"
            life, before, after = swap("life", "", began), "", ""
            if life < self.life:  # begun by who did not know of the one before
                life = swap("life", life, began)
            while True:
                there = json.loads(before or "[]")
                after = json.dumps([*there, card])
                if (found := swap("cards", before, after)) == after:
                    break
                before = found
            self.life, self._trusted = life, self._trusted or life
            return [each for each in there if each["id"] != card["id"]]

        ends = monotonic() + patience
        while True:
            try:
                return self._ask(work)
            except StoreError:
                if monotonic() > ends:
                    raise
                time.sleep(0.5)

    def is_new(self) -> bool:
        """Whether the store was started anew since this worker has registered. Raises StoreError."""
        return self.get("life") != self.life

    def trust(self) -> None:
        """Take decisions from the store that this worker has registered with: more than half of all are here."""
        self._trusted = self.life

    def decide(
        self, key: str, value: str, *, most: Callable[[], bool], binds: Callable[[], bool] = lambda: True
    ) -> str:
        """Return what was decided: `value`, unless something was before.

        Args:
            key: What is to be decided.
            value: What this worker proposes.
            most: Whether more than half of all are here, asked once the store has answered: a worker that was stopped
                has by then seen who is gone.
            binds: Called before the store may hear of it; whether this worker may still propose that.

        Raises:
            StoreError: If nothing was decided, as far as is known.
        """

        def work(swap: Swap) -> str:
            life = swap("life", _NOTHING, _NOTHING)
            if life != self._trusted and not (life == self.life and most()):
                if self._said != life:
                    self._said = life
                    text = (
                        "the store at %s was started anew: who is gone or late is waited for until over half are here"
                    )
                    _log.warning(text, self.address)
                raise StoreError("the store was restarted: more than half of the workers must return first")
            if not binds():
                raise StoreError("this worker has said otherwise since")
            self._trusted = life
            return swap(key, "", value)

        return self._ask(work)

    def get(self, key: str) -> str:
        """Return what a key has, "" if it is not set. Raises StoreError."""
        return self._ask(lambda swap: swap(key, _NOTHING, _NOTHING)).removeprefix(_NOTHING)

    def replace(self, key: str, old: str, new: str) -> str:
        """Return what a key has after it was set to `new` if it had `old`. Raises StoreError."""
        return self._ask(lambda swap: swap(key, old, new))

    def lack(self, what: str) -> StateError | None:
        """Say once for what a store that is away is needed, if for anything; return an error if it is for too long."""
        self._lacking = (self._lacking or monotonic()) if what and self._away else 0.0
        if not self._lacking:
            return None
        if what != self._said:
            self._said = what
            text = "%s, and only the store at %s can decide how to go on: waiting for it, %g s at most"
            _log.warning(text, what, self.address, self.patience)
        if monotonic() - self._lacking <= self.patience:
            return None
        return StateError(
            f"{what}, and only the store at {self.address} can decide how to go on: it has not answered for "
            f"{self.away:.0f} s ({self._why}); expected an answer within {self.patience:g} s. Start a new store, and "
            "all workers from their checkpoints"
        )

    def _ask(self, work: "Callable[[Swap], T]") -> T:
        """Do the work, which may be done twice. Raises StoreError."""
        with self._turn:
            while True:
                kept = self._connection
                try:
                    if self._closed:
                        raise StoreError("this worker has left")
                    connection = self._connection = kept or _Connection(self._host, self._port, self._prefix)
                    found = work(connection.swap)
                except StoreError:
                    raise
                except (OSError, ValueError, struct.error) as error:
                    if self._connection is not None:
                        self._connection.close()
                        self._connection = None
                    if kept is None or isinstance(error, TimeoutError):  # else it may have been started anew
                        self._miss(error)
                        raise StoreError(
                            f"the store at {self.address} does not answer ({error}): start one there with "
                            "torch.distributed.TCPStore(is_master=True), or pass the address of one that runs"
                        ) from None
                else:
                    self._hear()
                    if self._closed:
                        connection.close()
                    return found

    def _miss(self, error: Exception) -> None:
        self._why = str(error)
        if not self._away and self.life:
            _log.warning(
                "the store at %s does not answer (%s): until it is started there again, nobody can begin or join, and "
                "who is late or gone is waited for",
                self.address,
                error,
            )
        self._away = self._away or monotonic()

    def _hear(self) -> None:
        if self._away:
            if self.life:
                _log.warning("the store at %s answers again, after %.0f s", self.address, self.away)
            self._away, self._said = 0.0, ""


Swap = Callable[[str, str, str], str]
"""Returns what a key has after it was set to the last if it had the second; the second, if there is no such key."""


@final
class _Connection:
    """What TCPStore's client has: a socket. Each call raises OSError."""

    def __init__(self, host: str, port: int, prefix: str) -> None:
        self._prefix = prefix
        self._socket = socket.create_connection((host, port), _PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        self._socket.sendall(struct.pack("<BI", _VALIDATE, _MAGIC))

    def close(self) -> None:
        """End it, also for who waits for an answer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._answers.close()
        self._socket.close()

    def swap(self, key: str, old: str, new: str) -> str:
        """See `Swap`."""
        words = map(str.encode, (self._prefix + key, old, new))
        parts = [part for each in words for part in (struct.pack("<Q", len(each)), each)]
        self._socket.sendall(b"".join([bytes([_COMPARE_SET]), *parts]))
        (size,) = struct.unpack("<Q", self._read(8))
        return self._read(size).decode()

    def _read(self, size: int) -> bytes:
        found = self._answers.read(size) if size <= _LIMIT else b""
        if len(found) < size:
            raise ConnectionError("it has closed the connection, or is no TCPStore")
        return found
