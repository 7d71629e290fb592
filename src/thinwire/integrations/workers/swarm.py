"""Workers that find each other by a store, and what they say to each other. `agreement` says what follows from it."""

import json
import logging
import os
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import final

from thinwire.collectives.certificates import Certificate
from thinwire.collectives.links import SILENCE, Link, Words, dial, serve
from thinwire.errors import FingerprintError, StateError
from thinwire.integrations.workers import agreement
from thinwire.integrations.workers.agreement import Agreement
from thinwire.integrations.workers.awake import monotonic
from thinwire.integrations.workers.directory import Directory, StoreError
from thinwire.integrations.workers.messages import (
    Comparison,
    Decision,
    Digests,
    Note,
    Share,
    Standing,
    View,
    view_of,
)
from thinwire.integrations.workers.seat import Seat

_log = logging.getLogger("thinwire")


@final
class Swarm:
    """This worker among the others, and what it knows: `known`, which must not change outside `_changed`.

    `wanting`: who wants this worker's state; `gives`: gives it to them while this worker waits. `waited`: seconds for
    shares, those of all others and of each.
    """

    limit = 1 << 40

    def __init__(
        self,
        store: object,
        terms: str,
        following: Callable[[int], int],
        *,
        workers: int,
        quorum: float,
        grace: float,
        patience: float = 300.0,
        certificate: Certificate | None = None,
    ) -> None:
        self.id = f"{socket.gethostname()[:24]}-{os.getpid()}-{secrets.token_hex(3)}"
        self.known = Agreement(self.id, following, quorum, grace)
        self.waited, self.waited_for = 0.0, defaultdict[str, float](float)
        self._directory = Directory(store, certificate.digest if certificate else "", patience)
        self._seat = Seat(self._directory)
        self._certificate, self._terms, self._first = certificate, terms, workers
        self._changed = threading.Condition()
        self._links: dict[str, Link] = {}
        self._view: View = {}  # after the outer step that this worker has taken last
        self._compared = Comparison()
        self.wanting = set[str]()
        self.gives: Callable[[], None] = lambda: None
        self._state: tuple[Words, bytes] | None = None
        self._far = self._closed = self._fetches = self._begins = self._misses = False
        self._error: Exception | None = None  # for who waits
        self._dialled = dict[str, float]()  # whom, and since when
        self._opened = ExitStack()
        self._opened.callback(self._directory.close)
        with ExitStack() as failing:
            failing.callback(self.close, goodbye=False)
            self._card = {"id": self.id, "address": serve(self, self._directory.own_host, certificate, self._opened)}
            self._register(patience=60.0)
            threading.Thread(target=self._keep, daemon=True, name="thinwire-swarm").start()
            failing.pop_all()

    # --- what the training asks ---

    @property
    def at(self) -> int:
        """The tick of the latest outer step that this worker has taken, -1 before any state."""
        return self.known.at

    @property
    def furthest(self) -> int:
        """The tick of the latest outer step that anybody present has taken."""
        with self._changed:
            return max([self.at, *self._others()])

    @property
    def workers(self) -> list[str]:
        """Who is there now, this worker too."""
        with self._changed:
            return sorted(self.known.present)

    @property
    def digest(self) -> int:
        """Of the global parameters after the latest outer step."""
        return self._compared.digest(self.at)

    def found(self) -> bool:
        """Wait until this worker may begin the training (True), or another one is there to take its state from.

        Raises:
            StateError: If another one has begun it, and nobody who takes part can be reached.
        """
        began, said = monotonic(), False
        while True:
            with self._changed:
                self._changed.wait_for(self._somebody, timeout=0.5)
                self._check()
                if self._somebody():
                    return False
                present = self.known.present
            there, waited = len(present), monotonic() - began
            if waited > agreement.LOST and there < self._first and not said:
                said = True
                text = "%d of %d workers are present; the others must reach this one at %s:%d, and have the same store"
                _log.warning(text, there, self._first, *self._card["address"])
            enough = there >= self._first and (self._first > 1 or waited > agreement.FOUNDING)
            with suppress(StoreError):
                own = "{} {}:{}".format(self.id, *self._card["address"])
                if self._seat.take(own, enough=enough, present=present):
                    return True

    def begins(self) -> bool:
        """Wait, before the first outer step, until the store has the training. False if it has another one to `fetch`.

        Raises:
            StateError: If the store does not answer for long.
        """
        while not self._seat.begun:
            self._begins = True
            with suppress(StoreError):
                self._seat.hold(begins=True)
            with self._changed:
                self._changed.wait_for(lambda: self._seat.begun or self._seat.lost, timeout=0.5)
                self._check()
                if self._seat.lost:
                    _log.warning("another worker has begun the training meanwhile: this one takes over its state")
                    self.known, self._begins = self.known.anew(), False
                    return False
        self._begins = False
        return True

    def has_begun(self) -> bool:
        """Whether anybody has sent a share for the first outer step, as far as the store tells."""
        with suppress(StoreError):
            self._seat.hold()
        return self._seat.begun

    def _somebody(self) -> bool:
        return any(at >= 0 for at in self._others())

    def stand(self, tick: int, digests: Digests, view: View | None = None) -> None:
        """Note that this worker has taken the outer step at a tick or, with the view of the next, a state after it."""
        with self._changed:
            known = self.known
            if view is not None:
                known.begin(tick, view)
                self._far = False
            elif tick > known.at:
                view = known.decisions[tick].view
            known.at, self._view = tick, self._view if view is None else view
            self._compared.note(tick, digests)
            self._broadcast(self.status())
            self._consider()

    def settling(self) -> bool:
        """Wait a moment for those who are there and have no state. Return whether there are any, for half a minute."""
        with self._changed:
            self._changed.wait_for(lambda: self.wanting or self._all_have_a_state(), timeout=0.2)
            return monotonic() - self.known.began < agreement.LOST and not self._all_have_a_state()

    def _all_have_a_state(self) -> bool:
        return all(at >= 0 for at in self._others())

    def missed(self) -> int | None:
        """Return the tick of the first outer step that was decided and that this worker has not taken, if any."""
        with self._changed:
            tick = self.known.following(self.at)
            self._misses = max(self.known.last, self.furthest) >= tick
            return tick if self._misses else None

    def _misses_nothing(self) -> bool:
        """Whether nobody is there any more from whom this worker could hear what it has missed, if anything."""
        unheard = self.at < 0 or (self._misses and self.known.last <= self.at)
        return unheard and not self.known.ahead

    def differing(self, mine: Digests, tick: int | None = None) -> list[str]:
        """Return of which parameters another one's digest differs, after the latest outer step that both have taken.

        By default up to that which this worker stands at, where it has `mine`.

        Workers that say nothing for long, or were there and are gone, are not compared, and named.
        """
        with self._changed:
            tick = self.at if tick is None else tick
            question, began = self._compared.ask(tick), monotonic()
            while late := self._not_compared():
                here = late & self._links.keys()
                if monotonic() - began > (agreement.LOST if here else agreement.FOUNDING):
                    _log.warning("not compared with %s, as they do not answer", ", ".join(sorted(late)))
                    break
                for peer in here:
                    self._links[peer].send(question)
                self._changed.wait_for(lambda: not self._not_compared(), timeout=1.0)
            return self._compared.differing(tick, mine)

    def _not_compared(self) -> set[str]:
        return (self.known.view.keys() | self._links.keys()) - self._compared.others.keys() - {self.id}

    def send(self, tick: int, message: bytes, seconds: float) -> None:
        """Send this worker's share to all."""
        with self._changed:
            self.known.seconds, self.known.times[tick] = seconds, monotonic()
            self.known.sent = tick, self.known.times[tick]
            share = self.known.shares[tick][self.id] = Share(message, seconds, self.digest)
            self._broadcast(share.words(tick, self.id), message)
            self._consider()

    def outcome(self, tick: int) -> tuple[Decision, list[Share]] | None:
        """Wait until it is decided of whose shares the step is made, and return them; None to `fetch` a later state.

        None as well if this worker has `missed` the step, and nobody is there any more who has taken it.

        Raises:
            StateError: If workers had different global parameters before it, or none of the electors can be reached.
        """
        asked = began = 0.0
        heard = entered = monotonic()
        while True:
            if self.wanting and monotonic() - entered > self.known.grace:  # this worker may wait for just those
                self.gives()
            with self._changed:
                self._check()
                heard = self._heard(heard, bool(self.known.electors & self.known.present))
                found, here = self.known.decisions.get(tick), self.known.shares[tick]
                missing = [each for each in found.shares if each not in here] if found else []
                self.known.wait()
                if found and found.shares and not missing:
                    shares = [here[each] for each in found.shares]
                    if any(each.digest != self.digest for each in shares):
                        raise StateError(f"workers had different global parameters before tick {tick}")
                    return found, shares
                now = monotonic()
                began = began or (now if missing else 0.0)
                late = self.known.last >= tick and not (found and found.shares)
                lost = self._far or late or (began and now - began > agreement.LOST)
                if self.known.void or (lost and self.known.ahead) or self._misses_nothing():
                    return None
                if missing and now - asked > 1.0:
                    asked = now
                    self._broadcast({"kind": "want", "tick": tick, "ids": missing})
                self._wait_for_others(tick)

    def _wait_for_others(self, tick: int) -> None:
        """Wait a moment, and note whose shares were not here."""
        missing, before = self.known.awaited - self.known.shares[tick].keys(), monotonic()
        self._changed.wait(0.2)
        self.waited += (took := monotonic() - before)
        for peer in missing if tick == self.known.next else ():
            self.waited_for[peer] += took

    def fetch(self) -> tuple[int, View, bytes] | None:
        """Wait for the state of a worker that is further on: its tick, the view after it, and the state.

        Without a state, all later steps are void, and this worker goes on from its own. None if nobody is further on
        any more, and it has none or has `missed` what they took.

        Raises:
            StateError: If nobody who is further on can be reached.
        """
        asked, whom = 0.0, ""
        with self._changed, ExitStack() as ending:
            self._state, self._fetches, heard = None, True, monotonic()
            ending.callback(setattr, self, "_fetches", False)  # also where this is interrupted
            self._broadcast(self.status())  # nobody who could give it waits for this worker
            while self._state is None:
                self._check()
                self.known.wait()
                if void := self.known.void:
                    return void.tick, void.view, b""
                ahead = self.known.ahead
                if self._misses_nothing():
                    return None
                heard = self._heard(heard, bool(ahead))
                arriving = whom in ahead and self._links[whom].arriving
                if ahead and not arriving and (whom not in ahead or monotonic() - asked > self.known.grace):
                    others = {peer: at for peer, at in ahead.items() if peer != whom} or ahead  # it may be stuck
                    whom, asked = max(others, key=lambda peer: (others[peer], peer)), monotonic()
                    self._links[whom].send({"kind": "want state"})
                self._changed.wait(0.2)
            (words, body), self._state = self._state, None
            self._seat.join(str(words["training"]), begun=words["begun"] is True)
            return int(words["tick"]), view_of(words), body

    def _heard(self, before: float, anybody: bool) -> float:
        """Return when somebody was last there. Raises StateError if that is too long ago."""
        now = monotonic()
        if not anybody and now - before > agreement.GIVEN_UP:
            raise StateError(
                f"worker {self.id} has reached none of those that it needs to go on for {now - before:.0f} s: let "
                "workers reach each other's ports or, if they are gone, restart the store and all workers"
            )
        return now if anybody else before

    def give(self, state: bytes) -> None:
        """Send the state of the latest outer step to those who want it."""
        with self._changed:
            training = {"training": self._seat.training, "begun": self._seat.begun}
            words = {"kind": "state", "tick": self.at, "view": self._view, **training}
            for peer in self.wanting & self._links.keys() if not self._seat.lost else ():
                if self.known.status[peer].at < self.at:
                    self._links[peer].send(words, state)
            self.wanting.clear()

    def close(self, *, goodbye: bool) -> None:
        """Leave, with or without a word: that arrives, unless nobody takes it for seconds."""
        with self._changed:
            self._closed = True
            self._error = self._error or StateError("this worker has left: remove() was called while it waited")
            if goodbye:
                self._broadcast({"kind": "bye"})
            links = list(self._links.values())
            for link in links:
                link.close()
        if goodbye:
            self._seat.leave()
        self._opened.close()
        ends = monotonic() + SILENCE * goodbye
        for link in links:
            link.wait(ends - monotonic())

    # --- what links tell ---

    def status(self) -> Words:
        """Return where this worker is: nowhere, as long as it has no state to go on from."""
        with self._changed:
            known, nowhere = self.known, self._fetches or self._seat.lost
            mine = Standing(-1 if nowhere else self.at, known.seconds, known.last, known.life, known.note)
            return {"kind": "status", **mine.words()}

    def take(self, link: Link, words: Words, body: bytes) -> None:
        """Take a frame."""
        kind = str(words["kind"])
        with self._changed:
            if self._closed:
                raise ConnectionError("this worker has left")
            if kind == "hello":
                self._meet(link, words, body.decode())
            elif self._links.get(link.peer) is link:
                getattr(self, "_take_" + kind.replace(" ", "_"), self._unknown)(link, words, body)
            self._consider()

    def lost(self, link: Link, *, silent: bool) -> None:
        """Note that a link has ended."""
        with self._changed:
            if self._links.get(link.peer) is link:
                del self._links[link.peer], self.known.status[link.peer]
                self.known.mute.discard(link.peer)
                self.known.lost[link.peer] = monotonic(), silent
                self.wanting.discard(link.peer)
                said = "silent" if silent else "gone"
                _log.info("worker %s is %s; %d are present", link.peer, said, len(self.known.present))
            self._changed.notify_all()

    def _meet(self, link: Link, words: Words, theirs: str) -> None:
        if theirs != self._terms:
            text = f"worker {words['id']} has another model, recipe or settings: {_differently(theirs, self._terms)}"
            if self.at < 0:  # who has begun goes on
                self._error = FingerprintError(text)
            else:
                _log.warning("%s. It cannot join", text)
            link.send(*self._hello())
            link.close()
            return
        link.peer = str(words["id"])
        if not words.get("answer"):
            link.send(*self._hello(answer=True))
        self._links[link.peer], before = link, self._links.get(link.peer)
        if before is not None and before is not link:
            before.close(stays=True)
        self._take_status(link, words, b"")
        tick = self.known.next
        _log.info("worker %s has joined; %d are present", link.peer, len(self.known.present))
        if own := self.known.shares.get(tick, {}).get(self.id):
            link.send(own.words(tick, self.id), own.message)
        if self.id in self.known.have.get(tick, ()):
            link.send({"kind": "have", "tick": tick})

    def _take_status(self, link: Link, words: Words, body: bytes) -> None:
        self.known.status[link.peer] = Standing.of(words)

    def _take_share(self, link: Link, words: Words, body: bytes) -> None:
        tick = int(words["tick"])
        self.known.arrive(tick, str(words["id"]), Share.of(words, body))
        link.send({"kind": "got", "tick": tick})

    def _take_got(self, link: Link, words: Words, body: bytes) -> None:
        if took := self.known.got(int(words["tick"])):
            text = (
                "this worker's shares arrive too late, and did not count in %d outer steps: the last took %.1f s, and "
                "the others wait for grace=%g. Raise grace on all workers, or lower density or raise every to send less"
            )
            _log.warning(text, agreement.LATE, took, self.known.grace)

    def _take_have(self, link: Link, words: Words, body: bytes) -> None:
        tick = int(words["tick"])
        self.known.have[tick].add(link.peer)
        if tick == self.known.next:
            self.known.mute.discard(link.peer)

    def _take_decided(self, link: Link, words: Words, body: bytes) -> None:
        self.known.learn(Decision.of(words))

    def _take_want(self, link: Link, words: Words, body: bytes) -> None:
        self._pass_on(link, int(words["tick"]), map(str, words["ids"]))

    def _pass_on(self, link: Link, tick: int, peers: Iterable[str]) -> None:
        """Send shares of others, as far as they are here."""
        for each in peers:
            if share := self.known.shares.get(tick, {}).get(each):
                link.send(share.words(tick, each), share.message)

    def _take_ask(self, link: Link, words: Words, body: bytes) -> None:
        """Tell what was decided since a tick, if all of it is still here."""
        tick = self.known.following(int(words["since"]))
        if self.known.last >= tick and tick not in self.known.decisions:
            link.send({"kind": "far"})
        while decision := self.known.decisions.get(tick):
            self._pass_on(link, tick, decision.shares)
            link.send({"kind": "decided"} | decision._asdict())
            tick = self.known.following(tick)

    def _take_far(self, link: Link, words: Words, body: bytes) -> None:
        self._far = self.at < self.known.status[link.peer].at

    def _take_compare(self, link: Link, words: Words, body: bytes) -> None:
        link.send(*self._compared.answer(words))

    def _take_digests(self, link: Link, words: Words, body: bytes) -> None:
        self._compared.take(link.peer, words, body)

    def _take_want_state(self, link: Link, words: Words, body: bytes) -> None:
        self.wanting.add(link.peer)

    def _take_state(self, link: Link, words: Words, body: bytes) -> None:
        if int(words["tick"]) > self.at:  # not one that was asked for earlier
            self._state = words, body

    def _take_bye(self, link: Link, words: Words, body: bytes) -> None:
        self._dialled.pop(link.peer, None)
        if self.known.status[link.peer].last <= self.known.last:  # else it has decided more than this worker knows of
            self.known.left.add(link.peer)
        link.close()

    def _unknown(self, link: Link, words: Words, body: bytes) -> None:
        raise ValueError(f"{words['kind']!r:.40} is not a known message kind")

    # --- what it does by itself ---

    def _consider(self, *said: Note) -> None:
        """Say that all shares are here, once they are, and what a store has said; and see whether that decides."""
        if self.known.votes():
            self._broadcast({"kind": "have", "tick": self.known.next})
        if self.known.hear(*said):
            self._broadcast(self.status())
        if decision := self.known.count():
            self._broadcast({"kind": "decided"} | decision._asdict())
            if decision.shares and self.known.awaited != set(decision.shares):
                text = "the outer step at tick %d was taken by %s; waiting for %d workers at the next"
                _log.info(text, *decision[:2], len(self.known.awaited))
        self._changed.notify_all()

    def _keep(self) -> None:
        """Propose, ask and register anew when it is time."""
        looked = 0.0
        while not self._closed:
            with self._changed:
                self._changed.wait(0.1)
                if self._closed:  # and so without links, as if it were the last one
                    return
                self.known.alone = self._directory.away > 0.0
                self._consider()
                proposal = self.known.proposal()
                self._notice(proposal)
            with suppress(StoreError):
                if monotonic() - looked > 1.0:
                    looked = monotonic()
                    self._ask()
                    self._look()
                if proposal is not None and not self._directory.away:
                    self._decide(proposal)

    def _look(self) -> None:
        """See to it that the store knows this worker."""
        if self._directory.is_new():
            self._register()
        if self._are_most():
            self._directory.trust()
        self._seat.hold()

    def _notice(self, proposal: Decision | None) -> None:
        """Raise where this worker waits if it needs the store for too long in vain."""
        reached = self.known.electors & self.known.present if self.at >= 0 else self._somebody()
        lack = self.known.lack if proposal is not None or not reached else ""
        if error := self._directory.lack("nobody has begun" if self._begins else lack):
            self._error = error
            self._changed.notify_all()

    def _are_most(self) -> bool:
        with self._changed:
            return self.known.is_majority()

    def _decide(self, proposal: Decision) -> None:
        key, text = f"step {proposal.tick}", json.dumps(proposal._asdict())
        decided = self._directory.decide(key, text, most=self._are_most, binds=partial(self._binds, proposal))
        with self._changed:
            self._consider(Note(self._directory.life, Decision.of(json.loads(decided))))

    def _binds(self, proposal: Decision) -> bool:
        with self._changed:
            return self.known.life == self._directory.life and self.known.binds(proposal)

    def _ask(self) -> None:
        """Ask somebody who is further on what was decided."""
        with self._changed:
            last = self.known.last
            if last >= 0 and (ahead := [peer for peer, each in self.known.status.items() if each.last > last]):
                self._links[secrets.choice(ahead)].send({"kind": "ask", "since": last})

    def _register(self, patience: float = 0.0) -> None:
        """Put up this worker's card, and keep a link to all that were there before."""
        cards = self._directory.register(self._card, patience)
        with self._changed:
            self.known.life = max(self.known.life, self._directory.life)
            self._broadcast(self.status())
        for card in cards:
            peer, (host, port) = str(card["id"]), card["address"]
            if peer not in self._dialled and peer not in self._links:
                self._dialled[peer], address = monotonic(), (self._directory.reached(host), port)
                dial(self, address, self._hello, partial(self._wants, peer), self._certificate)

    def _wants(self, peer: str) -> bool | None:
        if self._closed or (began := self._dialled.get(peer)) is None:
            return None
        since = max(began, self.known.lost[peer][0] if peer in self.known.lost else began)
        return None if monotonic() - since > agreement.GIVEN_UP else peer not in self._links

    def _hello(self, *, answer: bool = False) -> tuple[Words, bytes]:
        return {**self.status(), "kind": "hello", "id": self.id, "answer": answer}, self._terms.encode()

    def _broadcast(self, words: Words, body: bytes = b"") -> None:
        for link in self._links.values():
            link.send(words, body)

    def _others(self) -> list[int]:
        """Return the ticks at which the others stand."""
        return [each.at for each in self.known.status.values()]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def _differently(theirs: str, mine: str) -> str:
    """Say where two texts begin to differ."""
    first = next((at for at, (x, y) in enumerate(zip(theirs, mine, strict=False)) if x != y), 0)
    at = max(0, first - 30)
    return f"…{theirs[at : at + 90]}…, where this one has …{mine[at : at + 90]}…: start all workers with the same"
