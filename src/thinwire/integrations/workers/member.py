"""A worker of a training that others join and leave: it finds them by a store."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, final

from typing_extensions import override

from thinwire import trace
from thinwire.collectives import packed, unpacked
from thinwire.integrations.membership.redistribution import without_residuals
from thinwire.integrations.membership.state import Standing
from thinwire.integrations.workers import outer_state
from thinwire.integrations.workers.awake import monotonic
from thinwire.integrations.workers.fragments import Fragment
from thinwire.integrations.workers.meeting import Meeting
from thinwire.integrations.workers.outer_handle import Outer, digests
from thinwire.integrations.workers.swarm import Swarm

_log = logging.getLogger("thinwire")


@final
class Member(Outer):
    """What `outer` returns with `store=`: it takes an outer step with those whose shares are there in time."""

    _swarm: Swarm

    def __init__(self, swarm: Swarm, *parts: Any) -> None:
        super().__init__(*parts)
        self._swarm, self._began = swarm, monotonic()
        swarm.gives = self._give
        self._counted: dict[str, int] = {}  # whose share was last in a step that this worker's state has, and in which
        self._taken: list[int] = []  # all in which its own was
        self._origin: int | None = None  # what the training began with
        with ExitStack() as failing:
            failing.callback(self.remove)
            self._enter(self.ticks)
            self._begin.joins()
            failing.pop_all()

    def _enter(self, tick: int) -> None:
        """Go on from another worker's state or, if nobody has one, begin the training with this one's at a tick."""
        while not self._swarm.found():
            if self._take_over():
                return
        self._swarm.stand(tick, digests(self.parameters), dict.fromkeys(self._swarm.workers, True))
        self._origin = self._swarm.digest
        while self._swarm.settling():
            self._give()

    @override
    def _arrive(self) -> None:
        self._go_on()
        for fragment in self.fragments:
            if fragment.meeting and fragment.meeting.taken is None:
                self._decided(fragment.meeting)
        super()._arrive()

    @override
    def check_state_dict(self, saved: Mapping[str, Any]) -> Standing:
        if self.inner_steps:
            raise RuntimeError(
                f"load_state_dict() was called after {self.inner_steps} inner steps, and with store= a worker cannot "
                "make the other workers return to that state: load before the first step, on all workers, with a new "
                "store"
            )
        if isinstance(saved, Mapping) and isinstance(count := saved.get("world_size"), int) and count > 1:
            raise ValueError(outer_state.of_a_group(count))  # resharded to one, it would be loaded by each of them
        return super().check_state_dict(saved)

    @override
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.check_state_dict(saved)
        if self._resumes(saved):
            super().load_state_dict(saved)

    def _resumes(self, saved: Mapping[str, Any]) -> bool:
        """Return whether this worker goes on from what it has saved; otherwise it goes on with the others.

        They hear of it before it has loaded that, which takes long: else they might begin meanwhile.
        """
        tick, begun = self.steps.latest(int(saved["step"])), self._swarm.has_begun()
        given = outer_state.global_parameters(saved, list(self.parameters))
        loaded = digests({name: x.to(self.parameters[name]) for name, x in given.items()})
        others = self._swarm.furthest
        if self._swarm.at == tick:
            same = digests(self.parameters) == loaded
        elif others == tick:  # which they have loaded, or trained to
            same = self._swarm.at == 0 and not self._swarm.differing(loaded, tick)
        else:
            same = self._swarm.at == 0 and tick > others and not begun
        if same:
            before = self._swarm.at
            self._swarm.stand(tick, loaded, self._swarm.known.view)
            self._origin = self._origin if before == tick else self._swarm.digest
        else:
            _log.info("the others are at tick %d: not resumed from tick %d, but from theirs", others, tick)
            self.go_back()
        return same

    @override
    def _meet(self) -> None:
        if self._swarm.wanting:
            self._give()
        if self.steps.parts_due(self.ticks):
            self._catch_up()
        super()._meet()

    @override
    def _send(self, found: Meeting) -> None:
        found.taken, message = None, found.message.numpy().tobytes()
        trace.count("sent_bytes", len(message) * (len(self.workers) - 1), self._meter)
        self._swarm.send(found.tick, message, monotonic() - self._began)

    @override
    def _finish(self, parts: Sequence[int]) -> None:
        tick, first = self.ticks - self.steps.delay, self.fragments[parts[0]] if parts else None
        found = first.meeting if first and first.meeting and first.meeting.tick == tick else None
        if first is None or not (found or first.arrived):  # a state that was taken over has it
            return
        if found and found.taken is None and not self._decided(found):
            return
        super()._finish(parts)
        self._swarm.stand(tick, digests(self.parameters))
        self._began = monotonic()

    def _decided(self, found: Meeting) -> bool:
        """Wait until it is decided whose shares count, and take them; or else a later state, and return False."""
        outcome = self._swarm.outcome(found.tick)
        if outcome is None:
            self._take_over(found)
            return False
        decision, shares = outcome
        self._counted |= dict.fromkeys(decision.shares, found.tick)
        taken = self.name in decision.shares
        self._taken += [found.tick] * taken
        found.arrive({who: share.message for who, share in zip(decision.shares, shares, strict=True)}, taken=taken)
        return True

    def _catch_up(self) -> None:
        """Take the outer steps that others have taken without this worker. Then comes the one that is still open."""
        before = self._swarm.at
        while not self._swarm.begins():
            self._enter(before)
        while (tick := self._swarm.missed()) is not None:
            self.ticks = tick
            self._encode(self.steps.parts_due(tick), 0.0).taken = None
            self.ticks += self.steps.delay
            self._finish(self.steps.parts_due(tick))
            self.ticks = self._swarm.at
        self.ticks = self.steps.following(self._swarm.at)

    def _take_over(self, sent: Meeting | None = None) -> bool:
        """Go on from the state of another worker. What this one has learnt that is not in there is yet to be sent.

        Return False if nobody is there any more of whom this one could take one.
        """
        if (found := self._swarm.fetch()) is None:
            self._end(sent)
            return False
        tick, view, body = found
        common = unpacked(body) if body else None
        if common is None:
            _log.warning("outer steps after tick %d are void: only workers that are gone had them", self._swarm.at)
        else:
            self._counted = common[0]["counted"]
        counted = self._end(sent)
        kin = common is None or common[0]["origin"] == self._origin
        if kin:
            self._take_back()
        elif self._learnt:
            _log.warning("the others have begun with other parameters: what this worker has learnt so far is dropped")
        self._load(common or self._common(), tick, counted, kin=kin)
        self.ticks = tick
        self._swarm.stand(tick, digests(self.parameters), view)
        return True

    def _take_back(self) -> None:
        """Have this worker's shares in outer steps that the others lack, which are void, wait for the next one."""
        last, held = self._counted.get(self.name, -1), self._swarm.known.shares
        void = {tick: held.get(tick, {}).get(self.name) for tick in self._taken if tick > last}
        self._taken = [tick for tick in self._taken if tick <= last]
        for tick, share in void.items():
            if share:
                self._restore(tick, share.message)
        if gone := [tick for tick, share in void.items() if not share]:
            text = "outer steps from tick %d to %d are void: what this worker had learnt for them is dropped"
            _log.warning(text, gone[0], gone[-1])

    def _restore(self, tick: int, message: bytes) -> None:
        parts = self.steps.parts_due(tick)
        for part in parts:
            self.fragments[part].attachment.steps.restart(*[self.steps.done(part, tick) - 1] * 2)
        found = self._encode(parts, 0.0)
        found.arrive({self.name: message}, taken=False)
        for part in parts:
            self.fragments[part].take_back(1 - self.steps.mixing)

    def _end(self, sent: Meeting | None) -> list[Fragment]:
        """End an exchange that others have overtaken. Return its fragments if their state has this worker's share."""
        if not sent:
            return []
        if counted := self._counted.get(self.name) == sent.tick:
            self._taken.append(sent.tick)
            sent.arrive({self.name: sent.message.numpy().tobytes()}, taken=True)
        else:
            sent.fail()
        found = [fragment for fragment in self.fragments if fragment.meeting is sent]
        for fragment in found:
            with suppress(RuntimeError):
                fragment.arrive()
            fragment.meeting = None
        return found if counted else []

    def _load(self, common: Sequence[Any], tick: int, counted: Sequence[Fragment], *, kin: bool) -> None:
        """Take over what is common to all. What a worker of theirs has learnt stays, but for these fragments."""
        saved, frozen, others = common
        with ExitStack() as stack:
            for fragment in self.fragments if kin else ():
                if fragment not in counted:
                    stack.enter_context(fragment.keeping_moves())
            outer_state.load(saved | {"step": tick}, self.fragments, self.steps, joining=True)
        self._running.restore(outer_state.running(saved))
        self._running.take(self._running.agreed)
        for name, mine in self._frozen.items():
            mine.detach().copy_(frozen[name])
        for fragment in counted:
            fragment.merge(self.steps.mixing)
        if not kin:
            self._running.take_others(others)
            self.go_back()
            self._learnt, self._taken, self._origin = False, [], saved["origin"]

    def _give(self) -> None:
        """Give others the state of the latest outer step, unless the mean of the next is here and not applied yet."""
        due = [each for each in self.fragments if each.meeting and each.meeting.tick > self._swarm.at]
        if not any(fragment.arrived for fragment in due):
            self._swarm.give(packed(self._common()))

    def _common(self) -> list[Any]:
        words = {"step": self._swarm.at, "counted": self._counted, "origin": self._origin}
        return [without_residuals(self._state()) | words, self._frozen, self._running.others]

    @override
    def _leave(self, *, goodbye: bool) -> None:
        self._swarm.close(goodbye=goodbye)
        for fragment in self.fragments:
            if fragment.meeting and fragment.meeting.taken is None:
                fragment.meeting.fail()
