"""All that trainers say to a server, one thing after the other, in the only thread that uses its socket."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import final

from thinwire.errors import PayloadError, ServerError
from thinwire.server.session import RefusedError, Session, Shared
from thinwire.wire.frames import FrameError, GoneError, Kind
from thinwire.wire.sockets import TICK, Listener

logger = logging.getLogger("thinwire")
_SOON = 0.01  # seconds until a message is tried again for which there was no room


@final
class Hub:
    """The sessions of a server's peers. `run` serves them until `close`; anybody may call `tell`."""

    def __init__(self, listener: Listener, shared: Shared) -> None:
        self._listener, self._shared = listener, shared
        self._peers: dict[bytes, Session] = {}
        self._due, self._open, self._draining, self._met = 0.0, True, False, set[str]()

    def run(self) -> None:
        """Serve until `close`."""
        try:
            while self._open:
                blocked = any(each.outbox for each in self._peers.values())
                self._listener.wait(_SOON if blocked else TICK)
                self._take_all()
                with self._shared.lock:
                    self._tick()
        except Exception as error:
            logger.exception("the server has failed")
            with self._shared.lock:
                self._shared.central.failure = f"the server has failed: {type(error).__name__}: {error}"
        finally:
            self._listener.close()

    def tell(self) -> None:
        """Tell all trainers what is on disk now."""
        self._due = 0.0
        self._listener.bell.ring()

    def close(self) -> None:
        """Return from `run`, with all connections closed."""
        self._open = False
        self._listener.bell.ring()

    def _take_all(self, seconds: float = TICK) -> None:
        """Hear all that has come, at most so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and (come := self._listener.receive()) is not None and self._open:
            peer, message, host = come
            with self._shared.lock:
                session = self._peers.get(peer) or Session(self._shared, peer, host)
                self._peers[peer] = session
                self._try(session, partial(session.take, message))
                self._release()

    def _tick(self) -> None:
        """Do what is due now and then: see who is gone, tell what is on disk, and say who is waited for."""
        if time.monotonic() > self._due:
            self._due = time.monotonic() + TICK
            for each in self._peers.values():
                each.ping()
            self._shared.rule.name()
        self._release()

    def _release(self) -> None:
        """Answer whose update has been applied, and send all that there is to say; count out who is gone."""
        self._answer()
        while not self._draining and (gone := [each for each in list(self._peers.values()) if not self._send(each)]):
            self._take_last(gone)
            self._answer()

    def _answer(self) -> None:
        """Answer whose update has been applied, until nobody has another."""
        shared = self._shared
        try:
            while answers := [] if shared.central.failure else shared.rule.release():
                for who, number, dropped in answers:
                    session = shared.sessions[who]
                    session.answer(number, dropped=dropped)
                    self._try(session, session.go_on)
                shared.lock.notify_all()
        except ServerError:
            pass  # which all are told
        if shared.central.failure:
            for each in list(shared.sessions.values()):
                each.end(Kind.REFUSED, shared.central.failure)

    def _try(self, session: Session, call: Callable[[], None]) -> None:
        """Have a session do something; if it cannot, that ends it and no other."""
        try:
            call()
        except RefusedError as error:
            logger.warning("a trainer at %s was refused: %s", session.host, error.logged)
            session.end(Kind.REFUSED, str(error))
        except (FrameError, PayloadError) as error:
            if session.host not in self._met:
                self._met.add(session.host)
                host = session.host
                logger.warning("closed a connection from %s: %s. Further ones from there are not logged", host, error)
            session.end(Kind.END, str(error))

    def _send(self, session: Session) -> bool:
        """Send what there is room for; if that is all, go on with what has come. Return whether the peer is there."""
        try:
            while session.outbox and self._listener.send(session.peer, session.outbox[0]):
                session.outbox.popleft()
                if session.queue and not session.outbox:
                    self._try(session, session.go_on)
                    self._listener.bell.ring()
        except GoneError:
            return False
        return True

    def _take_last(self, gone: list[Session]) -> None:
        """Hear the last words of those who are gone, and count them out."""
        for each in gone:
            each.outbox = deque(maxlen=0)  # nobody hears it
        self._draining = True  # or each message of many who go at once would look for them again
        self._take_all(math.inf)
        self._draining = False
        for each in gone:
            if self._peers.pop(each.peer, None) is not None:
                self._try(each, each.hung_up)
