"""Who comes to a server's address: each connection gets a thread, and strangers are reported once."""

import logging
import socket
import threading
from contextlib import suppress
from typing import final

from thinwire.errors import PayloadError
from thinwire.server.frames import FrameError, GoneError
from thinwire.server.joining import StrangerError
from thinwire.server.session import RefusedError, Session, Shared

logger = logging.getLogger("thinwire")
_STRANGERS = 64  # that may be at the door at one time
_REMEMBERED = 1024  # addresses of strangers


@final
class Door:
    """Accepts connections until it is closed, and has a session with each."""

    def __init__(self, listener: socket.socket, shared: Shared) -> None:
        self._listener, self._shared = listener, shared
        self._closed = threading.Event()
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._met = set[str]()
        self._talks: dict[threading.Thread, Session] = {}

    def accept(self) -> None:
        """Let everyone in who may, until the door is closed."""
        while not self._closed.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError:
                self._closed.wait(0.1)  # out of descriptors, perhaps
                continue
            self._receive(connection, str(peer[0]))

    def close(self) -> None:
        """Let nobody in any more, return from `accept`, and hang up on everyone."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for session in list(self._talks.values()):
            session.wire.close()

    def join(self, seconds: float) -> None:
        """Wait until all sessions have ended, for each at most so long."""
        for thread in list(self._talks):
            if thread.is_alive():
                thread.join(seconds)

    def _receive(self, connection: socket.socket, host: str) -> None:
        if not self._strangers.acquire(blocking=False):
            connection.close()
            return
        session = Session(connection, self._shared)
        thread = threading.Thread(target=self._converse, args=(session, host), daemon=True)
        self._talks[thread] = session
        thread.start()
        if self._closed.is_set():
            session.wire.close()

    def _converse(self, session: Session, host: str) -> None:
        inside = threading.Event()

        def let_in() -> None:
            inside.set()
            self._strangers.release()

        try:
            session.run(let_in)
        except GoneError as error:
            logger.info("trainer %s at %s is gone: %s", session.trainer[:8], host, error)
        except RefusedError as error:
            logger.warning("a trainer at %s was refused: %s", host, error)
        except (StrangerError, FrameError, PayloadError) as error:
            self._report(host, error)
        finally:
            if not inside.is_set():
                self._strangers.release()
            self._count(session)
            self._talks.pop(threading.current_thread(), None)

    def _count(self, session: Session) -> None:
        with self._shared.lock:
            self._shared.ended[0] += session.wire.sent
            self._shared.ended[1] += session.wire.received

    def _report(self, host: str, error: Exception) -> None:
        """Log once for each address."""
        with self._shared.lock:
            known = host in self._met or len(self._met) >= _REMEMBERED
            if not known:
                self._met.add(host)
        if not known:
            logger.warning("closed a connection from %s: %s. Further ones from there are not logged", host, error)
