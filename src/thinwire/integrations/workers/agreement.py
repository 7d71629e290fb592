"""Of whose shares an outer step is made: workers agree on that at each one.

Every worker sends its share to all others. A worker that has the shares of all that are waited for tells everybody,
and once all electors have, that is decided: two trips, and nobody asks the store. Where somebody is late, gone or new,
an elector with a share proposes to the store what the step is made of, and who elects and is waited for in the next
one; the first proposal decides. An elector that has said that it has all shares proposes nothing else, so the two ways
cannot disagree. A share that is not among those waits in its worker for the next step (`Meeting.taken`).

Present workers that nobody waits for, because they are slow or stuck, are electors, too: their links say what they
have while they compute, and if all others die they can go on. A worker that was waited for in vain `LATE` times is
waited for again once a share of its was in time. Once all electors have said that they leave, those elect that have
joined since.

A store that is started anew has forgotten. So what one decides counts once half of the electors have noted it (with the
store, that is most), and its next life decides only for more than half, who have said that they note nothing of an
earlier one any more; what any of them has noted is proposed again. Workers that are gone for long are in no half, nor
are those that close or reset a link, as a process does that ends: only if such a worker still reached the store, and
that is started anew, could two have gone on, and they raise as they meet again.

If all that have a share die before the others have it, an elector among the survivors voids the open step through the
store, and with it all that were decided since the last that they could take. Nobody gets past it by the void ones:
neither the elector nor the store lets them. A worker that has taken some takes over the state of the others, and sends
its shares again.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Set
from operator import itemgetter
from statistics import median
from typing import final

from thinwire.integrations.workers.awake import monotonic
from thinwire.integrations.workers.messages import NOTHING, Decision, Note, Share, Standing, View

KEPT = 1 << 26  # bytes of shares that are kept for those who missed them
FOUNDING = 5.0  # seconds for others to be heard of before a worker begins alone
LOST = 30.0  # seconds after which somebody silent, or that long overdue, does not count for a quorum
GIVEN_UP = 600.0  # seconds for which a worker that is gone is called, and others are waited for by who cannot go on
TURN = 0.5  # seconds by which the next one is later to propose
STALLED = 2.0  # seconds for everybody to say that all is there
LATE = 2  # how often somebody is waited for in vain


@final
class Agreement:
    """What a worker, `own`, knows of outer steps.

    It stands `at` a tick, -1 before any state. `last` is the latest tick that is decided, and `view` that of the `next`
    one. `status`: who else is present; `lost`: who is gone, since when, and whether silently; `left`: who has said that
    it leaves. `have`: who has said that it has all shares; `mute`: who will have them too late to say so. `reached`:
    the latest tick of which another one has this worker's share. `sent`, `voted`: at which tick, and when; `times`:
    when at each. `late`: who was waited for in vain, and how often. `stuck`: since when it waits for what nobody has.
    `alone`: whether the store does not answer, so that nobody can be taken in or left out. `life`: the store's latest
    that it knows of; `note`: what that has decided of the next step and does not count yet.
    """

    def __init__(self, own: str, following: Callable[[int], int], quorum: float, grace: float) -> None:
        self.own, self.following, self._quorum, self.grace = own, following, quorum, grace
        self.at, self.seconds, self.last, self.next = -1, 0.0, -1, -1
        self.view: View = {}
        self.status: dict[str, Standing] = {}
        self.lost: dict[str, tuple[float, bool]] = {}
        self.decisions: dict[int, Decision] = {}
        self.shares: dict[int, dict[str, Share]] = defaultdict(dict)
        self.have: dict[int, set[str]] = defaultdict(set)
        self.times: dict[int, float] = {}
        self.mute, self.left, self.late = set[str](), set[str](), Counter[str]()
        self.began, self.reached, self.sent, self.stuck = monotonic(), -1, (-1, 0.0), math.inf
        self._voted, self._proposed, self._since = (-1, 0.0), -1, (-1, 0.0, 0.0)
        self.alone, self._vain = False, set[int]()
        self.life, self.note, self._heard = "", NOTHING, NOTHING

    @property
    def awaited(self) -> set[str]:
        """Whose shares the next outer step waits for."""
        return {peer for peer, waits in self.view.items() if waits}

    @property
    def present(self) -> set[str]:
        """Who is there, this worker too."""
        return {self.own, *self.status}

    @property
    def electors(self) -> Set[str]:
        """Who elects: those of the view or, once all of them have left and nobody knows of more, who has a state."""
        if self.view.keys() - self.left or any(each.last > self.last for each in self.status.values()):
            return self.view.keys()
        return {self.own, *(peer for peer, each in self.status.items() if each.at >= 0)} if self.view else set()

    @property
    def lack(self) -> str:
        """Why an outer step may need the store, in words."""
        if gone := self.view.keys() - self.present:
            return f"{len(gone)} of {len(self.view)} workers are gone"
        return "a worker is late" if self.at >= 0 else "nobody has begun"

    @property
    def ahead(self) -> dict[str, int]:
        """Who has taken later outer steps, and which."""
        return {peer: each.at for peer, each in self.status.items() if each.at > self.at}

    @property
    def void(self) -> Decision | None:
        """The decision by which all steps after this worker's are void, if there is one."""
        return next((each for each in self.decisions.values() if not each.shares and each.back == self.at), None)

    def anew(self) -> "Agreement":
        """Return what a worker knows that has no state, among the same workers."""
        found = Agreement(self.own, self.following, self._quorum, self.grace)
        found.status, found.lost, found.alone, found.life = self.status, self.lost, self.alone, self.life
        return found

    def wait(self) -> None:
        """Note whether nobody here has what this worker waits for."""
        found = self.decisions.get(self.following(self.at), Decision(-1, (), {}))
        missing = set(found.shares) - self.shares.get(found.tick, {}).keys()
        gone = missing.isdisjoint(self.status) and (missing or not found.shares)
        stuck = gone and self.last > self.at and not self.ahead and not self.void
        self.stuck = min(self.stuck, monotonic()) if stuck else math.inf

    def begin(self, tick: int, view: View) -> None:
        """Go on from a state: that of this tick, and the view of the next outer step."""
        if tick > self.last:
            self.last, self.view, self.next = tick, view, self.following(tick)
        self.began = monotonic()
        self._advance()

    def arrive(self, tick: int, peer: str, share: Share) -> None:
        """Take another worker's share, and note whether it is in time: `grace` after this worker's at most."""
        if tick > self.last or tick in self.decisions:
            self.shares[tick].setdefault(peer, share)
        if tick > self.last or monotonic() - self.times.get(tick, -math.inf) <= self.grace:
            self.late.pop(peer, None)

    def got(self, tick: int) -> float:
        """Note that another one has this worker's share. Return after how long, once it was `LATE` times too long."""
        self.reached, decision = max(self.reached, tick), self.decisions.get(tick)
        took = monotonic() - self.times.get(tick, math.inf)
        if decision is None or tick in self._vain or len(self._vain) == LATE:
            return 0.0
        self._vain = {*self._vain, tick} if self.own not in decision.shares and took > self.grace else set()
        return took if len(self._vain) == LATE else 0.0

    def votes(self) -> bool:
        """Return whether this worker is to say that all shares are here, which it does once."""
        tick, awaited = self.next, self.awaited
        here = self.shares.get(tick, {}).keys()  # no store can take in whose share came beside those
        complete = awaited and (here == awaited or (self.alone and here >= awaited))
        if not complete or self.own not in self.view or tick in (self._voted[0], self._proposed):
            return False
        if self.own in self.awaited and not self.alone and self._is_to_change():
            return False
        self._voted = tick, monotonic()
        self.have[tick].add(self.own)
        return True

    def hear(self, *said: Note) -> bool:
        """Hear what a store has decided, from it or from others. Return whether this worker has to tell them more."""
        before, others = (self.life, self.note), self.status.values()
        self.life = max([self.life, *(each.life for each in others)])
        open_now = [each for each in (*said, *(each.note for each in others)) if each.decision.tick == self.next]
        self._heard = max([self._heard, *open_now], key=itemgetter(0))
        if self._heard.life >= self.life and self._heard.life > self.note.life:
            self.life, self.note = self._heard.life, self._heard
        return (self.life, self.note) != before

    def count(self) -> Decision | None:
        """See whether everybody has said so, or half have noted what a store has decided, which is returned."""
        if self.view and self.view.keys() <= self.have.get(self.next, set()):
            self.learn(Decision(self.next, tuple(sorted(self.awaited)), self.view))
        note, electors = self.note, self.electors
        noted = electors & {self.own, *(peer for peer, each in self.status.items() if each.note == note)}
        here = noted | {peer for peer in electors if peer in self.status or not self._is_out(peer)}
        if note is NOTHING or not noted or 2 * len(noted) < len(here):
            return None
        self.learn(note.decision)
        return note.decision

    def learn(self, decision: Decision) -> None:
        """Take what was decided."""
        if decision.tick > self.last:
            self.decisions[decision.tick] = decision
            self._advance()

    def _advance(self) -> None:
        self.stuck = math.inf  # until this worker has looked again
        while decision := self.decisions.get(self.next):
            if decision.shares:
                self.late.update((self.awaited | self._newcomers()) & self.status.keys() - set(decision.shares))
            self.last, self.view, self.next = self.next, decision.view, self.following(self.next)
        notes = self.note, self._heard
        self.note, self._heard = (each if each.decision.tick == self.next else NOTHING for each in notes)
        kept = 0
        for tick in sorted(self.shares, reverse=True):  # what those who are late may need, as far as there is room
            kept += sum(len(share.message) for share in self.shares[tick].values())
            if tick < self.last and tick != self.following(self.at) and kept > KEPT:
                for held in (self.shares, self.decisions, self.have, self.times):
                    held.pop(tick, None)

    def _is_to_change(self) -> bool:
        """Whether the view must, so that the store is asked."""
        heard_late = {peer for peer in self.view.keys() & self.mute if not self.view[peer]}
        return bool(self._newcomers() or self.view.keys() - self.present or heard_late)

    def _newcomers(self) -> set[str]:
        """Return who is ready for the next outer step without being waited for, and was not too often late."""
        most = self.seconds + self.grace
        ready = {peer for peer, each in self.status.items() if each.at == self.last and each.seconds <= most}
        return {peer for peer in ready - self.awaited if self.late[peer] < LATE}

    def proposal(self) -> Decision | None:
        """Return what to propose to the store, if it is time."""
        tick, view, electors, now = self.next, self.view, self.electors, monotonic()
        here, stuck = self.shares.get(tick, {}), self.stuck < math.inf
        if self.own in electors and self._heard is not NOTHING:
            return self._heard.decision if self._heard.life < self.life else None
        if self.own not in electors or (self.own not in here and not stuck) or tick in self.decisions:
            return None
        others = (self.status.keys() | here.keys()) - {self.own}
        if self.reached < tick and not stuck and not all(map(self._is_out, others)):
            return None  # should this worker die now, they could not take such a step
        turn = TURN * sorted(self.present & electors & (here.keys() | {self.own})).index(self.own)
        if self._voted[0] == tick:
            if now - self._voted[1] <= STALLED + turn:
                return None
            return Decision(tick, tuple(sorted(self.awaited)), view)
        beside = {peer for peer, each in self.status.items() if each.at == self.at}
        ready = {self.own, *beside} if stuck else here.keys()
        if len(ready) < math.floor(self._quorum * sum(not self._is_out(peer) for peer in self.awaited | ready)):
            return None
        if stuck:
            return self._voiding(ready) if now - self.stuck > STALLED + turn else None
        newcomers = self._newcomers()
        awaited = {peer for peer in self.awaited - (self.lost.keys() - self.status.keys()) if not self._is_out(peer)}
        late = (awaited | newcomers) - here.keys()
        if self._since[0] != tick:
            self._since = tick, now, now
        if late and now - self._since[1] < self.grace:
            self._since = tick, self._since[1], now
            return None
        if now - self._since[2] < turn:
            return None
        most = median(share.seconds for share in here.values()) + self.grace
        in_time = {peer for peer, share in here.items() if share.seconds <= most}
        others = (view.keys() | here.keys() | newcomers) & self.present - self.mute
        return Decision(tick, tuple(sorted(here)), {peer: peer in in_time for peer in sorted(in_time | others)})

    def binds(self, proposal: Decision) -> bool:
        """Return whether this worker may propose that now; if so, it says nothing else about that outer step."""
        if proposal.tick != self.next:
            return False
        if self._heard is not NOTHING:
            return proposal == self._heard.decision
        if self._voted[0] == self.next:
            self.mute |= self.view.keys() - self.have[self.next]
            return proposal == Decision(self.next, tuple(sorted(self.awaited)), self.view)
        self._proposed = self.next
        return True

    def _voiding(self, ready: Set[str]) -> Decision:
        view = {peer: peer in ready for peer in sorted(self.electors & self.present)}
        return Decision(self.next, (), view, self.at)

    def _is_out(self, peer: str) -> bool:
        """Whether a worker sends no share, however long the others wait: it is gone or stuck, or has no state yet.

        One that has not been met yet may still be heard of.
        """
        now = monotonic()
        if peer in self.status:
            (at, seconds, *_), (tick, when) = self.status[peer], self.sent
            overdue = now - when - max(self.seconds, seconds)
            return at < 0 or (tick == self.next and overdue > LOST and peer not in self.shares[tick])
        if peer not in self.lost:
            return peer != self.own and now - self.began > FOUNDING
        when, silent = self.lost[peer]
        return not silent or now - when > LOST

    def is_majority(self) -> bool:
        """Whether more than half of the electors are here and know of the store's life, but for those gone for long.

        A worker not met since this one took its state is silent. One that is back counts, whatever it knows.
        Not if one knows of a step of which this worker does not: a store that was restarted may have decided it.
        """
        if any(each.last > self.last for each in self.status.values()):
            return False
        now = monotonic()
        electors = self.electors
        away = {peer: self.lost.get(peer, (self.began, True)) for peer in electors - self.present}
        gone = {peer for peer, (when, silent) in away.items() if now - when > (GIVEN_UP if silent else LOST)}
        present = {self.own, *(peer for peer, each in self.status.items() if each.life == self.life)} & electors
        return 2 * len(present) > len(electors - gone)
