"""Connections to a server's address: each gets a thread, and unauthenticated ones are logged once per address."""

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import final

from thinwire.errors import PayloadError
from thinwire.server.frames import FrameError, GoneError
from thinwire.server.joining import StrangerError
from thinwire.server.session import RefusedError, Session, Shared

logger = logging.getLogger("thinwire")
_STRANGERS = 64  # that may be at the door at one time; then the one that came first has to go
_REMEMBERED = 1024  # addresses of strangers


@final
class Door:
    """Accepts connections until it is closed, and has a session with each."""

    def __init__(self, listener: socket.socket, shared: Shared) -> None:
        self._listener, self._shared = listener, shared
        self._closed, self._lock = threading.Event(), threading.Lock()  # the server's is held while a step is computed
        self._strangers: dict[Session, None] = {}  # the one that came first is first
        self._met = set[str]()
        self._talks: dict[threading.Thread, Session] = {}

    def accept(self) -> None:
        """Accept connections until `close`."""
        while not self._closed.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError:
                self._closed.wait(0.1)  # out of descriptors, perhaps
                continue
            try:
                self._receive(connection, str(peer[0]))
            except RuntimeError as error:  # no thread can be started
                logger.warning("a connection from %s was closed: %s", peer[0], error)
                connection.close()

    def close(self) -> None:
        """Stop accepting, return from `accept`, and close every connection."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for session in list(self._talks.values()):
            session.wire.close()

    def tell(self, say: Callable[[Session], None]) -> None:
        """Call `say` for every authenticated session. Does not take the server's lock."""
        for session in list(self._talks.values()):
            if session not in self._strangers:
                with suppress(GoneError):  # its own thread will notice
                    say(session)

    def join(self, seconds: float) -> None:
        """Wait until all sessions have ended, for each at most so long."""
        for thread in list(self._talks):
            if thread.is_alive():
                thread.join(seconds)

    def _receive(self, connection: socket.socket, host: str) -> None:
        session = Session(connection, self._shared)
        self._make_room(session)
        thread = threading.Thread(target=self._converse, args=(session, host), daemon=True)
        self._talks[thread] = session
        thread.start()
        if self._closed.is_set():
            session.wire.close()

    def _make_room(self, stranger: Session) -> None:
        """Evict the oldest unauthenticated connection if there are too many: a trainer authenticates at once."""
        with self._lock:
            first = next(iter(self._strangers)) if len(self._strangers) >= _STRANGERS else None
            self._strangers[stranger] = None
        if first is not None:
            first.wire.close()
            self._let_in(first)

    def _let_in(self, session: Session) -> None:
        with self._lock:
            self._strangers.pop(session, None)

    def _converse(self, session: Session, host: str) -> None:
        try:
            session.run(lambda: self._let_in(session))
        except GoneError as error:
            logger.info("trainer %s at %s is gone: %s", session.trainer[:8], host, error)
        except RefusedError as error:
            logger.warning("a trainer at %s was refused: %s", host, error)
        except (StrangerError, FrameError, PayloadError) as error:
            self._report(host, error)
        finally:
            self._let_in(session)
            with self._shared.lock:
                self._shared.ended[0] += session.wire.sent
                self._shared.ended[1] += session.wire.received
            self._talks.pop(threading.current_thread(), None)

    def _report(self, host: str, error: Exception) -> None:
        with self._lock:
            known = host in self._met or len(self._met) >= _REMEMBERED
            if not known:
                self._met.add(host)
        if not known:
            logger.warning("closed a connection from %s: %s. Further ones from there are not logged", host, error)
