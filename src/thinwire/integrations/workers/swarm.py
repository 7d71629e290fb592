"""Workers that find each other, and agree at each outer step on whose shares it is made of.

Every worker sends its share to all others. Whoever has the shares of all that are waited for says so to everybody, and
once all electors have, that is decided: two trips, and nobody asks the store. Where somebody is late, gone or new, an
elector with a share proposes to the store what the step is made of, and who elects and is waited for in the next one;
the first proposal decides. Who has said that it has all shares proposes nothing else, so the two ways cannot disagree.

Present workers that nobody waits for, because they are slow or stuck, are electors, too: their links say what they
have while they compute, and if all others die they can go on.
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
from collections.abc import Callable, Mapping
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
_LOST = 30.0  # seconds after which somebody silent, or that long overdue, does not count for a quorum
_GIVEN_UP = 600.0  # seconds for which a worker that is gone is called, and others are waited for by who cannot go on
_TURN = 0.5  # seconds by which the next one is later to propose
_STALLED = 2.0  # seconds for everybody to say that all is there
_MOST = 1 << 40
_BEGUN = "begun"  # a key of the store: there is a state that others must take over


class Share(NamedTuple):
    """What a worker sends in an outer step. `seconds`: what its inner steps took; `digest`: of where it began."""

    message: bytes
    seconds: float
    digest: int


View = Mapping[str, bool]
"""The electors of an outer step, and whether it waits for their shares."""


class Decision(NamedTuple):
    """Of whose shares the outer step at a tick is made, and the view of the next."""

    tick: int
    shares: tuple[str, ...]
    view: View


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
        self._view: View = {}  # after the latest decision
        self._view_at: View = {}  # after that at `at`
        self._decisions: dict[int, Decision] = {}
        self._shares: dict[int, dict[str, Share]] = defaultdict(dict)
        self._have: dict[int, set[str]] = defaultdict(set)
        self._voted, self._proposed, self._since = (-1, 0.0), -1, (-1, 0.0, 0.0)
        self._sent = -1, 0.0
        self._mute = set[str]()  # who has shares too late to say so in time
        self._wanting = set[str]()
        self._state: tuple[Words, bytes] | None = None
        self._far = self._closed = self._fetches = False
        self._begun = time.monotonic()
        self._refused = ""
        self._dialled = dict[str, float]()  # whom, and since when
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

    def begin(self, tick: int, view: View, digest: int) -> None:
        """Go on from a state: that of this tick, and the view of the next outer step."""
        with self._changed:
            if tick > self._last:
                self._last, self._view = tick, view
                self._next = self._following(tick)
            self._far, self._begun = False, time.monotonic()
            self._advance()
            self._stand(tick, view, digest)

    def resume(self, tick: int, digest: int) -> None:
        """Go on from a state that this worker has saved."""
        with self._changed:
            self.begin(tick, self._view, digest)

    @property
    def furthest(self) -> int:
        """The tick of the latest outer step that anybody present has taken."""
        with self._changed:
            return max([self.at, *(int(each["at"]) for each in self._status.values())])

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
            self._stand(tick, self._view if tick == self._last else self._decisions[tick].view, digest)

    def _stand(self, tick: int, view: View, digest: int) -> None:
        self.at, self._view_at, self.digest = tick, view, digest
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
            self.seconds, self._sent = seconds, (tick, time.monotonic())
            share = self._shares[tick][self.id] = Share(message, seconds, self.digest)
            self._broadcast(_words(tick, self.id, share), message)
            self._consider()

    def outcome(self, tick: int) -> tuple[Decision, list[Share]] | None:
        """Wait until it is decided of whose shares the step is made, and return them; None if they are not to be had.

        Raises:
            StateError: If workers had different global parameters before it, or none of the electors can be reached.
        """
        asked = began = 0.0
        with self._changed:
            heard = time.monotonic()
            while True:
                self._check()
                heard = self._heard(heard, any(each == self.id or each in self._links for each in self._view))
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
        missing, before = self._awaited() - self._shares[tick].keys(), time.monotonic()
        self._changed.wait(0.2)
        for peer in missing if tick == self._next else ():
            self.waited_for[peer] += time.monotonic() - before

    def fetch(self) -> tuple[int, View, bytes]:
        """Wait for the state of a worker that is further on: its tick, the view after it, and the state.

        Raises:
            StateError: If nobody who is further on can be reached.
        """
        asked, whom = 0.0, ""
        with self._changed:
            self._state, self._fetches, heard = None, True, time.monotonic()
            self._broadcast(self.status())  # nobody who could give it waits for this worker
            while self._state is None:
                self._check()
                ahead = {peer: int(each["at"]) for peer, each in self._status.items() if int(each["at"]) > self.at}
                heard = self._heard(heard, bool(ahead))
                arriving = whom in ahead and self._links[whom].arriving
                if ahead and not arriving and (whom not in ahead or time.monotonic() - asked > self._grace):
                    others = {peer: at for peer, at in ahead.items() if peer != whom} or ahead  # it may be stuck
                    whom, asked = max(others, key=lambda peer: (others[peer], peer)), time.monotonic()
                    self._links[whom].send({"kind": "want state"})
                self._changed.wait(0.2)
            (words, body), self._state, self._fetches = self._state, None, False
            return int(words["tick"]), _view(words), body

    def _heard(self, before: float, anybody: bool) -> float:
        """Return when somebody was last there. Raises StateError if that is too long ago."""
        now = time.monotonic()
        if not anybody and now - before > (_GIVEN_UP if self.at >= 0 else _LOST):
            raise StateError(
                f"worker {self.id} has reached none of those that it needs to go on for {now - before:.0f} s: let "
                "workers reach each other's ports or, if they are gone, restart the store and all workers"
            )
        return now if anybody else before

    def asked(self) -> bool:
        """Whether another worker wants this one's state."""
        return bool(self._wanting)

    def give(self, state: bytes) -> None:
        """Send the state of the latest outer step to those who want it."""
        with self._changed:
            for peer in self._wanting & self._links.keys():
                if int(self._status[peer]["at"]) < self.at:
                    self._links[peer].send({"kind": "state", "tick": self.at, "view": self._view_at}, state)
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
        """Return where this worker is: nowhere, as long as it has no state to go on from."""
        return {"kind": "status", "at": -1 if self._fetches else self.at, "seconds": self.seconds}

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
                self._mute.discard(link.peer)
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
        tick = int(words["tick"])
        self._have[tick].add(link.peer)
        if tick == self._next:
            self._mute.discard(link.peer)

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
        tick, view, awaited = self._next, self._view, self._awaited()
        elector, free = self.id in view, tick not in (self._voted[0], self._proposed)
        complete = bool(awaited) and self._shares.get(tick, {}).keys() == awaited
        if elector and free and complete and (self.id not in awaited or not self._is_to_change()):
            self._voted = tick, time.monotonic()
            self._have[tick].add(self.id)
            self._broadcast({"kind": "have", "tick": tick})
        if view and view.keys() <= self._have.get(tick, set()):
            self._learn(Decision(tick, tuple(sorted(awaited)), view))
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

    def _awaited(self) -> set[str]:
        return {peer for peer, waits in self._view.items() if waits}

    def _present(self) -> set[str]:
        return {self.id, *self._links}

    def _is_to_change(self) -> bool:
        """Whether the view must, so that the store is asked."""
        heard_late = {peer for peer in self._view.keys() & self._mute if not self._view[peer]}
        return bool(self._newcomers() or self._view.keys() - self._present() or heard_late)

    def _newcomers(self) -> set[str]:
        """Return who is ready for the next outer step without being waited for, and as fast as this worker."""
        most = self.seconds + self._grace
        ready = {peer for peer, s in self._status.items() if s["at"] == self._last and s["seconds"] <= most}
        return ready - self._awaited()

    def _proposal(self) -> Decision | None:
        """Return what to propose to the store, if it is time."""
        tick, view, now = self._next, self._view, time.monotonic()
        here = self._shares.get(tick, {})
        if self.id not in view or self.id not in here or tick in self._decisions:
            return None
        turn = _TURN * sorted(self._present() & view.keys() & here.keys()).index(self.id)
        if self._voted[0] == tick:
            if now - self._voted[1] <= _STALLED + turn:
                return None
            self._mute |= view.keys() - self._have[tick]
            return Decision(tick, tuple(sorted(self._awaited())), view)
        if len(here) < math.ceil(self._quorum * sum(not self._is_out(peer) for peer in self._awaited() | here.keys())):
            return None
        newcomers = self._newcomers()
        awaited = {
            peer for peer in self._awaited() - (self._lost.keys() - self._links.keys()) if not self._is_out(peer)
        }
        late = (awaited | newcomers) - here.keys()
        if self._since[0] != tick:
            self._since = tick, now, now
        if late and now - self._since[1] < self._grace:
            self._since = tick, self._since[1], now
            return None
        if now - self._since[2] < turn:
            return None
        most = median(share.seconds for share in here.values()) + self._grace
        in_time = {peer for peer, share in here.items() if share.seconds <= most}
        others = (view.keys() | here.keys() | newcomers) & self._present() - self._mute
        return Decision(tick, tuple(sorted(here)), {peer: peer in in_time for peer in sorted(in_time | others)})

    def _is_out(self, peer: str) -> bool:
        """Whether a worker sends no share, however long the others wait: it is gone or stuck, or has no state yet.

        Who has not been met yet may still be heard of.
        """
        if peer in self._links:
            status, (tick, when) = self._status[peer], self._sent
            overdue = time.monotonic() - when - max(self.seconds, float(status["seconds"]))
            stuck = tick == self._next and overdue > _LOST and peer not in self._shares[tick]
            return stuck or int(status["at"]) < 0
        if peer not in self._lost:
            return peer != self.id and time.monotonic() - self._begun > _FOUNDING
        when, silent = self._lost[peer]
        return not silent or time.monotonic() - when > _LOST

    def _is_majority(self) -> bool:
        """Whether more than half of the electors are here, not counting those that are gone for long."""
        now = time.monotonic()
        gone = {peer for peer, (when, silent) in self._lost.items() if now - when > (_GIVEN_UP if silent else _LOST)}
        present = self._view.keys() & self._present()
        return 2 * len(present) > len(present | self._view.keys() - gone)

    def _keep(self) -> None:
        """Propose, ask and register anew when it is time."""
        looked = 0.0
        while not self._closed:
            with self._changed:
                self._changed.wait(0.1)
                proposal = self._proposal()
                if proposal is not None and self._voted[0] != proposal.tick:
                    self._proposed = proposal.tick
                most = self._is_majority()
            with suppress(StoreError):
                if proposal is not None:
                    self._decide(proposal, most=most)
                elif time.monotonic() - looked > 1.0:
                    looked = time.monotonic()
                    self._ask()
                    if self._directory.is_new():
                        self._register()
                    if most:
                        self._directory.trust()
                    if self._decisions:
                        self._directory.replace(_BEGUN, "", self.id)

    def _decide(self, proposal: Decision, *, most: bool) -> None:
        text = self._directory.decide(f"step {proposal.tick}", json.dumps(proposal._asdict()), most=most)
        with self._changed:
            decision = _decision(json.loads(text))
            self._learn(decision)
            self._broadcast({"kind": "decided"} | decision._asdict())
            if self._awaited() != set(proposal.shares):
                count = len(self._awaited())
                text = "the outer step at tick %d was taken by %s; waiting for %d workers at the next"
                _log.info(text, *decision[:2], count)

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
        if self._closed or (began := self._dialled.get(peer)) is None:
            return None
        since = max(began, self._lost[peer][0] if peer in self._lost else began)
        return None if time.monotonic() - since > _GIVEN_UP else peer not in self._links

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
    return Decision(int(words["tick"]), tuple(map(str, words["shares"])), _view(words))


def _view(words: Words) -> View:
    return {str(peer): bool(waits) for peer, waits in words["view"].items()}
