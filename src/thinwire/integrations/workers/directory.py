"""What workers ask a TCPStore: who else is there, and, where not all of them agree in time, what was decided.

Who proposes first decides: the store sets a key once. One that was started anew has forgotten what it had, so workers
take a decision from it only if more than half of them are there.
"""

import json
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, final

import torch.distributed as dist

T = TypeVar("T")
_PATIENCE = 3.0  # seconds for an answer
_NOTHING = "?"


class StoreError(ConnectionError):
    """The store does not answer, or must not decide."""


@final
class Directory:
    """A connection to the store at `tcp://host:port`, made anew when it is lost. Each call takes seconds at most.

    All its keys begin with `run`: who has another one finds nothing.
    """

    def __init__(self, address: str, run: str = "") -> None:
        scheme, _, rest = address.partition("://")
        self._host, _, port = rest.rpartition(":")
        if scheme != "tcp" or not self._host or not port.isdigit():
            raise ValueError(f"store is {address!r}; expected the address of a TCPStore, such as tcp://10.0.0.1:29400")
        self._port, self._run, self._store = int(port), run, None
        self._known = self._trusted = ""  # lives of the store
        self._closed = False

    @property
    def own_host(self) -> str:
        """The address of this machine, as the store's host sees it."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self._host, self._port))
            found: str = probe.getsockname()[0]
            return found

    def close(self) -> None:
        """Let go of the connection."""
        self._closed, self._store = True, None

    def register(self, card: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Put up this worker's card. Return those of workers before it, dead ones too. Raises StoreError."""

        def work(store: Any) -> list[dict[str, Any]]:
            self._known = _set_once(store, "life", uuid.uuid4().hex)
            self._trusted = self._trusted or self._known
            number = store.add("cards", 1)
            store.set(f"card {number}", json.dumps(card))
            keys = [f"card {each}" for each in range(1, number)]
            cards = [json.loads(each) for each in (store.multi_get(keys) if keys else ())]
            return [each for each in cards if each["id"] != card["id"]]

        return self._ask(work)

    def is_new(self) -> bool:
        """Whether the store was started anew since this worker has registered. Raises StoreError."""
        return self._ask(lambda store: _read(store, "life")) != self._known

    def trust(self) -> None:
        """Take decisions from the store that this worker has registered with: more than half of all are here."""
        self._trusted = self._known

    def decide(self, key: str, value: str, *, most: bool) -> str:
        """Return what was decided: `value`, unless something was before. `most`: more than half of all are here."""

        def work(store: Any) -> str:
            life = _read(store, "life")
            if life != self._trusted and not most:
                raise StoreError("the store was restarted: more than half of the workers must return first")
            self._trusted = life
            return _set_once(store, key, value)

        return self._ask(work)

    def has(self, key: str) -> bool:
        """Whether a key is set. Raises StoreError."""
        return self._ask(lambda store: _read(store, key)) != _NOTHING

    def replace(self, key: str, old: str, new: str) -> str:
        """Return what a key has after it was set to `new` if it had `old`. Raises StoreError."""
        return self._ask(lambda store: str(store.compare_set(key, old, new).decode()))

    def _ask(self, work: Callable[[Any], T]) -> T:
        """Do the work in a thread: torch's client may wait for ever for a host that is gone."""
        answers, errors = list[T](), list[Exception]()

        def run() -> None:
            try:
                store = self._store or _connected(self._host, self._port, self._run)
                answers.append(work(store))
                self._store = None if self._closed else store
            except (RuntimeError, OSError) as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True, name="thinwire-store")
        thread.start()
        thread.join(_PATIENCE)
        if not answers:
            self._store = None
            why = errors[0] if errors else f"no answer in {_PATIENCE:g} s"
            raise StoreError(f"the store at {self._host}:{self._port}: {why}")
        return answers[0]


def _connected(host: str, port: int, run: str) -> Any:
    made: Any = dist  # which does not export them, as mypy has it
    patience = timedelta(seconds=_PATIENCE)
    return made.PrefixStore(run, made.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience))


def _set_once(store: Any, key: str, value: str) -> str:
    return str(store.compare_set(key, "", value).decode())


def _read(store: Any, key: str) -> str:
    return str(store.compare_set(key, _NOTHING, _NOTHING).decode())
