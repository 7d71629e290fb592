"""Workers that find each other, and agree at each outer step on whose shares it is made of.

Every worker sends its share to all others. Whoever has the shares of all that are expected says so to everybody, and
once all of them have, that is decided: two trips, and nobody asks the store. Where somebody is late, gone or new, a
worker that is there proposes to the store what the step is made of, and whom to expect in the next one; the first
proposal decides. Who has said that it has all shares proposes nothing else, so the two ways cannot disagree.
"""

import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, NamedTuple, final

from thinwire.collectives.certificates import Certificate
from thinwire.collectives.links import Link, Words, dial, serve
from thinwire.errors import FingerprintError, StateError
from thinwire.integrations.workers.directory import Directory, StoreError

_log = logging.getLogger("thinwire")

_KEPT = 1 << 26  # bytes of shares that are kept for those who missed them
_FOUNDING = 5.0  # seconds for others to be heard of before a worker begins alone
_LOST = 30.0  # seconds after which somebody silent does not count for a quorum
_GIVEN_UP = 600.0  # seconds for which a worker that is gone is called
_TURN = 0.5  # seconds by which the next one is later to propose
_STALLED = 2.0  # seconds for everybody to say that all is there
_MOST = 1 << 40
_BEGUN = "begun"  # a key of the store: there is a state that others must take over


class Share(NamedTuple):
    """What a worker sends in an outer step. `seconds`: what its inner steps took; `digest`: of where it began."""

    message: bytes
    seconds: float
    digest: int


class Decision(NamedTuple):
    """Of whose shares the outer step at a tick is made, and who is expected at the next."""

    tick: int
    shares: tuple[str, ...]
    view: tuple[str, ...]


@final
class Swarm:
    """This worker among the others. `at`: the tick of the latest outer step that it has taken, -1 before any state."""

    def __init__(
        self,
        address: str,
        terms: str,
        following: Callable[[int], int],
        *,
        workers: int,
        quorum: float,
        grace: float,
        certificate: Certificate | None = None,
    ) -> None:
        self.id = f"{socket.gethostname()[:24]}-{os.getpid()}-{secrets.token_hex(3)}"
        self.at, self.digest, self.seconds = -1, 0, 0.0
        self.waited_for = defaultdict[str, float](float)
        self._directory = Directory(address, certificate.digest if certificate else "")
        self._certificate, self._terms, self._following = certificate, terms, following
        self._first, self._quorum, self._grace = workers, quorum, grace
        self._changed = threading.Condition()
        self._links: dict[str, Link] = {}
        self._status: dict[str, Words] = {}
        self._lost: dict[str, tuple[float, bool]] = {}
        self._last, self._next = -1, -1
        self._view = self._expected = tuple[str, ...]()  # after the latest decision, and after that at `at`
        self._decisions: dict[int, Decision] = {}
        self._shares: dict[int, dict[str, Share]] = defaultdict(dict)
        self._have: dict[int, set[str]] = defaultdict(set)
        self._voted, self._proposed, self._since = (-1, 0.0), -1, (-1, 0.0, 0.0)
        self._wanting = set[str]()
        self._state: tuple[Words, bytes] | None = None
        self._far = self._closed = False
        self._begun = time.monotonic()
        self._refused = ""
        self._dialled = dict[str, float]()  # whom, and when it was there or first looked for
        self._card = {"id": self.id, "address": serve(self, self._directory.own_host, certificate)}
        self._register(patience=60.0)
        threading.Thread(target=self._keep, daemon=True, name="thinwire-swarm").start()

    # --- what the training asks ---

    @property
    def workers(self) -> list[str]:
        """Who is there now, this worker too."""
        with self._changed:
            return sorted([self.id, *self._links])

    def found(self) -> bool:
        """Wait until this worker may begin the training (True), or another one is there to take its state from.

        Raises:
            StateError: If the training has begun, and nobody who takes part can be reached.
        """
        began = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(self._somebody, timeout=0.5)
                self._check()
                if self._somebody():
                    return False
                there = 1 + len(self._links)
            waited = time.monotonic() - began
            with suppress(StoreError):
                enough = there >= self._first and (self._first > 1 or waited > _FOUNDING)
                if self._directory.has(_BEGUN):
                    if waited > _LOST:
                        raise StateError(
                            "this run has begun, and none of its workers can be reached from here: let workers reach "
                            "each other's ports or, if all are gone, restart the store"
                        )
                elif enough and self._may_found(late=waited > _LOST):
                    return True

    def _may_found(self, *, late: bool) -> bool:
        first = self._directory.replace("founder", "", self.id)
        gone = late and first not in self._links
        return first == self.id or (gone and self._directory.replace("founder", first, self.id) == self.id)

    def begin(self, tick: int, view: Sequence[str], digest: int) -> None:
        """Go on from a state: that of this tick, after which these workers are expected."""
        with self._changed:
            if tick > self._last:
                self._last, self._view = tick, tuple(view)
                self._next = self._following(tick)
            self._far, self._begun = False, time.monotonic()
            self._advance()
        self.applied(tick, digest)

    def settling(self) -> bool:
        """Wait a moment for those who are there and have no state. Return whether there are any, for half a minute."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanting or self._all_have_a_state(), timeout=0.2)
            return time.monotonic() - self._begun < _LOST and not self._all_have_a_state()

    def _all_have_a_state(self) -> bool:
        return all(int(each["at"]) >= 0 for each in self._status.values())

    def applied(self, tick: int, digest: int) -> None:
        """Note that this worker has taken the outer step at a tick."""
        with self._changed:
            self.at, self.digest = tick, digest
            self._expected = self._view if tick == self._last else self._decisions[tick].view
            self._broadcast(self.status())
            self._consider()

    def missed(self) -> int | None:
        """Return the tick of the first outer step that was decided and that this worker has not taken, if any."""
        with self._changed:
            tick = self._following(self.at)
            ahead = max((int(each.get("at", -1)) for each in self._status.values()), default=-1)
            return tick if self._last >= tick or ahead >= tick else None

    def send(self, tick: int, message: bytes, seconds: float) -> None:
        """Send this worker's share to all."""
        with self._changed:
            self.seconds = seconds
            share = self._shares[tick][self.id] = Share(message, seconds, self.digest)
            self._broadcast(_words(tick, self.id, share), message)
            self._consider()

    def outcome(self, tick: int) -> tuple[Decision, list[Share]] | None:
        """Wait until it is decided of whose shares the step is made, and return them; None if they are not to be had.

        Raises:
            StateError: If workers had different global parameters before it.
        """
        asked = began = 0.0
        with self._changed:
            while True:
                self._check()
                found, here = self._decisions.get(tick), self._shares[tick]
                missing = [each for each in found.shares if each not in here] if found else []
                if found and not missing:
                    shares = [here[each] for each in found.shares]
                    if any(each.digest != self.digest for each in shares):
                        raise StateError(f"workers had different global parameters before tick {tick}")
                    return found, shares
                now = time.monotonic()
                began = began or (now if missing else 0.0)
                if self._far or (found is None and self._last >= tick) or (began and now - began > _LOST):
                    return None
                if missing and now - asked > 1.0:
                    asked = now
                    self._broadcast({"kind": "want", "tick": tick, "ids": missing})
                self._wait_for_others(tick)

    def _wait_for_others(self, tick: int) -> None:
        """Wait a moment, and note whose shares were not here."""
        missing, before = set(self._view) - self._shares[tick].keys(), time.monotonic()
        self._changed.wait(0.2)
        for peer in missing if tick == self._next else ():
            self.waited_for[peer] += time.monotonic() - before

    def fetch(self) -> tuple[int, Sequence[str], bytes]:
        """Wait for the state of a worker that is further on: its tick, who is expected after it, and the state."""
        asked, whom = 0.0, ""
        with self._changed:
            self._state = None
            while self._state is None:
                self._check()
                ahead = {peer: int(each["at"]) for peer, each in self._status.items() if int(each["at"]) > self.at}
                if ahead and (whom not in self._links or time.monotonic() - asked > _LOST):
                    whom, asked = max(ahead, key=lambda peer: (ahead[peer], peer)), time.monotonic()
                    self._links[whom].send({"kind": "want state"})
                self._changed.wait(0.2)
            (words, body), self._state = self._state, None
            return int(words["tick"]), tuple(map(str, words["view"])), body

    def asked(self) -> bool:
        """Whether another worker wants this one's state."""
        return bool(self._wanting)

    def give(self, state: bytes) -> None:
        """Send the state of the latest outer step to those who want it."""
        with self._changed:
            for peer in self._wanting & self._links.keys():
                self._links[peer].send({"kind": "state", "tick": self.at, "view": self._expected}, state)
            self._wanting.clear()

    def close(self, *, goodbye: bool) -> None:
        """Leave, with or without a word."""
        with self._changed:
            self._closed = True
            if goodbye:
                self._broadcast({"kind": "bye"})
            for link in list(self._links.values()):
                link.close()

    # --- what links tell ---

    def limit(self) -> int:
        """Return the most bytes that a body may have."""
        return _MOST

    def status(self) -> Words:
        """Return where this worker is."""
        return {"kind": "status", "at": self.at, "seconds": self.seconds}

    def take(self, link: Link, words: Words, body: bytes) -> None:
        """Take a frame."""
        kind = str(words["kind"])
        with self._changed:
            if self._closed:
                raise ConnectionError("this worker has left")
            if kind == "hello":
                self._meet(link, words)
            elif self._links.get(link.peer) is link:
                getattr(self, "_take_" + kind.replace(" ", "_"), self._unknown)(link, words, body)
            self._consider()

    def lost(self, link: Link, *, silent: bool) -> None:
        """Note that a link has ended."""
        with self._changed:
            if self._links.get(link.peer) is link:
                del self._links[link.peer], self._status[link.peer]
                self._lost[link.peer] = time.monotonic(), silent
                self._wanting.discard(link.peer)
                _log.info(
                    "worker %s is %s; %d are present", link.peer, "silent" if silent else "gone", len(self.workers)
                )
            self._changed.notify_all()

    def _meet(self, link: Link, words: Words) -> None:
        if words["terms"] != self._terms:
            self._refused = f"worker {words['id']} has another model, recipe or settings"
            link.send(self._hello())
            link.close()
            return
        link.peer = str(words["id"])
        if not words.get("answer"):
            link.send(self._hello() | {"answer": True})
        self._links[link.peer], before = link, self._links.get(link.peer)
        if before is not None and before is not link:
            before.close()
        self._take_status(link, words, b"")
        _log.info("worker %s has joined; %d are present", link.peer, len(self.workers))
        if own := self._shares.get(self._next, {}).get(self.id):
            link.send(_words(self._next, self.id, own), own.message)
        if self.id in self._have.get(self._next, ()):
            link.send({"kind": "have", "tick": self._next})

    def _take_status(self, link: Link, words: Words, body: bytes) -> None:
        self._status[link.peer] = {"at": int(words["at"]), "seconds": float(words["seconds"])}

    def _take_share(self, link: Link, words: Words, body: bytes) -> None:
        tick = int(words["tick"])
        if tick > self._last or tick in self._decisions:
            share = Share(body, float(words["seconds"]), int(words["digest"]))
            self._shares[tick].setdefault(str(words["id"]), share)

    def _take_have(self, link: Link, words: Words, body: bytes) -> None:
        self._have[int(words["tick"])].add(link.peer)

    def _take_decided(self, link: Link, words: Words, body: bytes) -> None:
        self._learn(_decision(words))

    def _take_want(self, link: Link, words: Words, body: bytes) -> None:
        tick = int(words["tick"])
        for each in words["ids"]:
            if share := self._shares.get(tick, {}).get(str(each)):
                link.send(_words(tick, str(each), share), share.message)

    def _take_ask(self, link: Link, words: Words, body: bytes) -> None:
        """Tell what was decided since a tick, if all of it is still here."""
        tick = self._following(int(words["since"]))
        if self._last >= tick and tick not in self._decisions:
            link.send({"kind": "far"})
        while tick in self._decisions:
            decision = self._decisions[tick]
            for each in decision.shares:
                if share := self._shares[tick].get(each):
                    link.send(_words(tick, each, share), share.message)
            link.send({"kind": "decided"} | decision._asdict())
            tick = self._following(tick)

    def _take_far(self, link: Link, words: Words, body: bytes) -> None:
        self._far = self.at < int(self._status[link.peer]["at"])

    def _take_want_state(self, link: Link, words: Words, body: bytes) -> None:
        self._wanting.add(link.peer)

    def _take_state(self, link: Link, words: Words, body: bytes) -> None:
        self._state = words, body

    def _take_bye(self, link: Link, words: Words, body: bytes) -> None:
        self._dialled.pop(link.peer, None)
        link.close()

    def _unknown(self, link: Link, words: Words, body: bytes) -> None:
        raise ValueError(f"{words['kind']!r:.40} is not a known message kind")

    # --- what is decided ---

    def _consider(self) -> None:
        """Say that all shares are here, once they are; and see whether everybody has said so."""
        tick, view = self._next, set(self._view)
        here = self._shares.get(tick, {})
        member, free = self.id in view and self.id in here, tick not in (self._voted[0], self._proposed)
        if member and free and here.keys() == view and not self._newcomers():
            self._voted = tick, time.monotonic()
            self._have[tick].add(self.id)
            self._broadcast({"kind": "have", "tick": tick})
        if view and view <= self._have.get(tick, set()):
            everybody = tuple(sorted(view))
            self._learn(Decision(tick, everybody, everybody))
        self._changed.notify_all()

    def _learn(self, decision: Decision) -> None:
        if decision.tick > self._last:
            self._decisions[decision.tick] = decision
            self._advance()

    def _advance(self) -> None:
        while decision := self._decisions.get(self._next):
            self._last, self._view, self._next = self._next, decision.view, self._following(self._next)
        self._prune()
        self._changed.notify_all()

    def _prune(self) -> None:
        """Keep what those who are late may need, as far as there is room."""
        kept = 0
        for tick in sorted(self._shares, reverse=True):
            kept += sum(len(share.message) for share in self._shares[tick].values())
            if tick < self._last and kept > _KEPT:
                for held in (self._shares, self._decisions, self._have):
                    held.pop(tick, None)

    def _newcomers(self) -> set[str]:
        """Return who is ready for the next outer step without being expected, and as fast as this worker."""
        most = self.seconds + self._grace
        ready = {peer for peer, s in self._status.items() if s["at"] == self._last and s["seconds"] <= most}
        return ready - set(self._view)

    def _proposal(self) -> Decision | None:
        """Return what to propose to the store, if it is time."""
        tick, view, now = self._next, self._view, time.monotonic()
        here = self._shares.get(tick, {})
        if self.id not in view or self.id not in here or tick in self._decisions:
            return None
        turn = _TURN * sorted(peer for peer in view if peer == self.id or peer in self._links).index(self.id)
        if self._voted[0] == tick:
            everybody = tuple(sorted(view))
            return Decision(tick, everybody, everybody) if now - self._voted[1] > _STALLED + turn else None
        if len(here) < math.ceil(self._quorum * sum(not self._is_out(peer) for peer in view)):
            return None
        newcomers = self._newcomers()
        late = ({peer for peer in self._links.keys() & view if not self._is_out(peer)} | newcomers) - here.keys()
        if self._since[0] != tick:
            self._since = tick, now, now
        if late and now - self._since[1] < self._grace:
            self._since = tick, self._since[1], now
            return None
        if now - self._since[2] < turn:
            return None
        most = median(share.seconds for share in here.values()) + self._grace
        expected = {peer for peer, share in here.items() if share.seconds <= most} | (newcomers - late)
        return Decision(tick, tuple(sorted(here)), tuple(sorted(expected)))

    def _is_out(self, peer: str) -> bool:
        """Whether a worker sends no share, however long the others wait: it is gone, or has yet to get its state."""
        if peer in self._links:
            return int(self._status[peer]["at"]) < 0
        when, silent = self._lost.get(peer, (0.0, False))
        return peer != self.id and (not silent or time.monotonic() - when > _LOST)

    def _keep(self) -> None:
        """Propose, ask and register anew when it is time."""
        looked = 0.0
        while not self._closed:
            with self._changed:
                self._changed.wait(0.1)
                proposal = self._proposal()
                if proposal is not None and self._voted[0] != proposal.tick:
                    self._proposed = proposal.tick
                most = 2 * sum(peer == self.id or peer in self._links for peer in self._view) > len(self._view)
            with suppress(StoreError):
                if proposal is not None:
                    self._decide(proposal, most=most)
                elif time.monotonic() - looked > 1.0:
                    looked = time.monotonic()
                    self._ask()
                    if self._directory.is_new():
                        self._register()
                    if self._decisions:
                        self._directory.replace(_BEGUN, "", self.id)

    def _decide(self, proposal: Decision, *, most: bool) -> None:
        text = self._directory.decide(f"step {proposal.tick}", json.dumps(proposal._asdict()), most=most)
        with self._changed:
            decision = _decision(json.loads(text))
            self._learn(decision)
            self._broadcast({"kind": "decided"} | decision._asdict())
            if (without := set(proposal.view) ^ set(decision.view)) or set(self._view) != set(proposal.shares):
                _log.info(
                    "the outer step at tick %d was taken by %s; %d expected at the next%s",
                    *decision[:2],
                    len(decision.view),
                    without or "",
                )

    def _ask(self) -> None:
        """Ask somebody who is further on what was decided."""
        with self._changed:
            ahead = [peer for peer, each in self._status.items() if int(each["at"]) > self._last >= 0]
            if ahead:
                self._links[secrets.choice(ahead)].send({"kind": "ask", "since": self._last})

    def _register(self, patience: float = 0.0) -> None:
        """Put up this worker's card, and keep a link to all that were there before."""
        ends = time.monotonic() + patience
        while True:
            try:
                cards = self._directory.register(self._card)
                break
            except StoreError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.5)
        for card in cards:
            peer, (host, port) = str(card["id"]), card["address"]
            if peer not in self._dialled and peer not in self._links:
                self._dialled[peer] = time.monotonic()
                dial(self, (host, port), self._hello, partial(self._wants, peer), self._certificate)

    def _wants(self, peer: str) -> bool | None:
        now = time.monotonic()
        if self._closed or now - self._dialled.get(peer, 0.0) > _GIVEN_UP:
            return None
        if peer in self._links:
            self._dialled[peer] = now
        return peer not in self._links

    def _hello(self) -> dict[str, Any]:
        return {**self.status(), "kind": "hello", "id": self.id, "terms": self._terms}

    def _broadcast(self, words: Words, body: bytes = b"") -> None:
        for link in self._links.values():
            link.send(words, body)

    def _somebody(self) -> bool:
        return any(int(each["at"]) >= 0 for each in self._status.values())

    def _check(self) -> None:
        if self._refused:
            raise FingerprintError(self._refused)


def _words(tick: int, peer: str, share: Share) -> Mapping[str, Any]:
    return {"kind": "share", "tick": tick, "id": peer, "seconds": share.seconds, "digest": share.digest}


def _decision(words: Words) -> Decision:
    return Decision(int(words["tick"]), tuple(map(str, words["shares"])), tuple(map(str, words["view"])))
