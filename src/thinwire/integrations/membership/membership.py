"""The ranks that exchange gradients, their step, and this rank's residuals; what groups do on all ranks or on none."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from thinwire.checked import OnError
from thinwire.collectives import Group, all_gather_plain
from thinwire.errors import StateError
from thinwire.integrations.membership import state
from thinwire.integrations.membership.redistribution import noting_from
from thinwire.integrations.momentum.handover import Handover
from thinwire.integrations.training.steps import Steps
from thinwire.reducer import Reducer, Released
from thinwire.trace import Meter

_log = logging.getLogger("thinwire")

Divisor = Callable[[bool, Steps], float]
"""How many ranks does a sum stand for? All of them, or only those that still have data.

Arguments: whether this rank has run out of data, and its steps, which then follow those of the others. Raises
RuntimeError if ranks must not run out of data.
"""


@final
class Membership:
    """One rank among those that exchange the gradients of a model: its recipe and memories, its step, its place.

    `groups`: those of the mesh; the first exchanges gradients. `agreed` says whether ranks have compared where they
    stand, `resting` has frozen parameters, for which something may wait from before, and `samples` is this rank's
    weight in means, if they are weighted.
    """

    def __init__(
        self,
        recipe: Reducer,
        parameters: Mapping[str, nn.Parameter],
        groups: Sequence[Group],
        *,
        resting: Mapping[str, nn.Parameter],
        handover: Handover,
        divisor: Divisor,
    ) -> None:
        self.recipe, self.groups, self.group, self.handover = recipe, groups, groups[0], handover
        self.parameters, self.steps = parameters, Steps(parameters, recipe.memories())
        self._known = {**resting, **parameters}
        self.meter, self.loss_scale = Meter(), 1.0
        self.divisor, self.agreed = divisor, False
        self.samples: int | None = None

    @property
    def waits(self) -> bool:
        """Whether this rank holds a residual."""
        memories = self.recipe.memories()
        held = ((m.free, fields) for m in memories for fields in m.state().values())
        return any(bool(x.any()) for free, fields in held for field, x in fields.items() if field not in free)

    def agree(self) -> None:
        """Compare where the ranks stand, once. A collective of the mesh. Raises StateError where they differ."""
        if not self.agreed:
            self._compare(self.standing)

    def weight(self, *, joined: bool) -> float:
        """Return this rank's share of all samples. `joined`: it has no data. A collective."""
        assert self.samples is not None
        total = torch.tensor(0 if joined else self.samples, device=next(iter(self.parameters.values())).device)
        dist.all_reduce(total, group=self.group)
        return self.samples / max(int(total), 1)

    def follow_loss_scale(self, scale: float) -> None:
        """Rescale the residuals to this loss scale."""
        if scale != self.loss_scale:
            for memory in self.recipe.memories():
                memory.rescale(scale / self.loss_scale)
            self.loss_scale = scale

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memories and step, as tensors and plain containers."""
        self.steps.rest()
        memories = self.recipe.memories()
        return {
            "version": state.VERSION,
            "rank": self.group.rank(),
            "world_size": self.group.size(),
            "recipe": state.words(self.recipe),
            # Ranks without data have taken the others' last gradients for applied.
            "step": self.steps.step + (self.steps.uneven and self.steps.open),
            "draw": self.steps.draw,
            "loss_scale": self.loss_scale,
            "momentum": self.handover.settings(),
            "fields": state.kinds(memories),
            "memories": [
                {n: {f: x.clone() for f, x in held.items()} for n, held in m.state().items()} for m in memories
            ],
        }

    def load_state_dict(self, saved: Mapping[str, Any], check: Callable[[Mapping[str, Any]], state.Standing]) -> None:
        """Resume from this rank's `state_dict`, if it passes the `check`, on every rank of the mesh or on none."""
        self._compare(lambda: check(saved))
        self._go_on_from(saved)
        state.load(saved, self.recipe.memories(), self._known)
        if self.recipe.changes or self.handover.active:
            state.hold_alike(self.group, self.recipe.memories(), self._known)
        self.handover.restore(saved["momentum"])
        self.meter.end()

    def check_state_dict(self, saved: Mapping[str, Any]) -> state.Standing:
        """Return where this rank would go on from. Raises ValueError if `load_state_dict` would, on this rank alone."""
        rank, world_size = self.group.rank(), self.group.size()
        return state.check(saved, self.recipe, self._known, rank=rank, world_size=world_size)

    def regroup(self, group: Group) -> None:
        """Go on with another group from the latest step of its ranks, and with this rank's residuals; a collective."""
        steps, draws = zip(*all_gather_plain((self.steps.step, self.steps.draw), group), strict=True)
        self.recipe.prepare(group)
        self.steps.restart(max(steps), max(draws))
        size = group.size()
        factor = self.group.size() / size
        for memory in self.recipe.memories() if factor != 1 else ():
            held = memory.state()
            memory.restore(noting_from(held, held, factor))
        self.groups, self.group, self.divisor, self.agreed = [group], group, lambda joined, steps: size, True

    def join(self, saved: Mapping[str, Any]) -> None:
        """Go on at another rank's step and with its notes, from its `state_dict`; each keeps its own residual."""
        count = saved["world_size"]
        state.check(saved, self.recipe, self._known, rank=saved["rank"], world_size=count)
        self._go_on_from(saved)
        saved = state.renamed(saved, self._known)
        memories, factor = self.recipe.memories(), count / self.group.size()
        pairs = zip(memories, saved["memories"], strict=True)
        noted = [noting_from(memory.state(), theirs, factor) for memory, theirs in pairs]
        state.load({"memories": noted}, memories, self.parameters)
        self.handover.restore(saved["momentum"])
        self.handover.accept()  # the residual there says nothing about the one here
        self.meter.end()

    def take_over(self, earlier: "Membership") -> None:
        """Take over the residuals of an earlier attachment to some of these parameters, frozen ones too."""
        earlier.steps.settle_by_gradients()
        here = {p: name for name, p in self._known.items()}
        names = {old: here[p] for old, p in earlier._known.items() if p in here}
        self.follow_loss_scale(earlier.loss_scale)
        mine, theirs = self.recipe.memories(), earlier.recipe.memories()
        same = earlier.keeps_like(self.recipe, self.parameters)
        for memory, other in zip(mine, theirs, strict=True) if same else ():
            held = other.state()
            memory.restore({new: held[old] for old, new in names.items() if old in held})
            if (dropped := held.keys() - names.keys()) and self.group.rank() == 0:
                _log.warning("the residuals of %s are dropped, as this model lacks these parameters", sorted(dropped))
        if not same and earlier.handover.active:  # nothing waits; the optimizer has its momentum to itself again
            earlier.handover.give_up(self.group, earlier.loss_scale)
        self.steps.restart(earlier.steps.step, earlier.steps.draw)
        self.handover.accept()

    def keeps_like(self, recipe: Reducer, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether `recipe` has memories for what this one keeps, also where it serves parameters under other names."""
        if state.kinds(self.recipe.memories()) != state.kinds(recipe.memories()):
            return False
        theirs = {p: state.waiting_length(recipe, name, p) for name, p in parameters.items()}
        lengths = ((p, state.waiting_length(self.recipe, name, p)) for name, p in self.parameters.items())
        return all(theirs.get(p, length) == length for p, length in lengths)

    def release(self, averages: str) -> None:
        """Average uncompressed from now on, as `averages` says in the log, and give momentum back; a collective."""
        if self.handover.active:
            agreed(self.groups, self.handover.check_returnable, RuntimeError)
        self.steps.settle_by_gradients()
        if self.handover.active:
            self.handover.give_up(self.group, self.loss_scale)
        self.recipe = Released(waiting=tuple(self.recipe.memories()))
        self.meter.end()
        level = logging.DEBUG if self.group.rank() else logging.WARNING
        _log.log(level, "removed: gradients are averaged uncompressed from now on; %s", averages)

    def standing(self) -> state.Standing:
        """Return where this rank stands."""
        return state.Standing(step=self.steps.step, draw=self.steps.draw)

    def _compare(self, mine: Callable[[], state.Standing]) -> None:
        together(self.groups, lambda group: state.agree(group, mine), ValueError, StateError)
        self.agreed = True

    def _go_on_from(self, saved: Mapping[str, Any]) -> None:
        self.steps.restart(saved["step"], saved["draw"])
        self.follow_loss_scale(float(saved["loss_scale"]))


T = TypeVar("T")


def group_or_all(group: Group | None) -> Group:
    """Return the group, by default that of all ranks. Raises RuntimeError if there is none."""
    found = group or dist.group.WORLD
    if found is None:
        raise RuntimeError("there is no process group yet: call torch.distributed.init_process_group() first")
    return found


def together(groups: Sequence[Group], check: Callable[[Group], None], *errors: type[Exception]) -> None:
    """Run a check over each group, which raises on all its ranks or none, and raise its errors on the whole mesh."""
    found: tuple[int, str] | None = None
    for group in groups:
        try:
            check(group)
        except errors as raised:
            found = found or (_kind(raised, errors), str(raised))
    if found := first_found(groups, found) if len(groups) > 1 else found:
        raise errors[found[0]](found[1])


def agreed(
    groups: Sequence[Group],
    work: Callable[[], T],
    *errors: type[Exception],
    undo: Callable[[T], None] = lambda done: None,
) -> T:
    """Return what `work` gives on this rank. If it raises on any rank of the mesh, raise one of these errors on all.

    By default these are TypeError, ValueError and RuntimeError. Where it had worked, `undo` it then. The first error
    that fits names the kind, else the last: put special ones first. A collective of all ranks of the mesh.
    """
    errors = errors or (TypeError, ValueError, RuntimeError)
    done: list[T] = []
    own: Exception | None = None
    try:
        done.append(work())
    except Exception as raised:  # whatever it is, the other ranks must not wait for this one
        own = raised
    me = f"rank {dist.get_rank() if dist.is_initialized() else [each.rank() for each in groups]}"
    said = f"{me}: {own if isinstance(own, errors) else repr(own)}"
    found = first_found(groups, None if own is None else (_kind(own, errors), said))
    if own is not None:
        raise own
    if found is not None:
        undo(done[0])
        raise errors[found[0]](found[1])
    return done[0]


def raise_on_all(groups_of: Callable[[Mapping[str, object]], Sequence[Group]]) -> OnError:
    """Return what raises, on every rank, a TypeError or ValueError that one rank alone has about its arguments.

    The other ranks, which `groups_of` finds from the arguments, hear of it in the function's first `agreed`.
    """

    def tell(error: Exception, given: Mapping[str, object]) -> None:
        def refuse() -> None:
            raise error

        agreed(groups_of(given), refuse, TypeError, ValueError)

    return tell


def given_group(given: Mapping[str, object]) -> list[Group]:
    """Return the group that is among a function's arguments, by default all ranks; none if there is none.

    Workers with a store form none, and nobody would answer.
    """
    found = None if given.get("store") is not None else given.get("group") or dist.group.WORLD
    return [found] if isinstance(found, Group) else []


def first_found(groups: Sequence[Group], mine: T | None) -> T | None:
    """Return what some rank of the mesh has found, as JSON has it, first of all this one, else None; a collective."""
    for group in groups:  # along columns, then along rows: that reaches everybody
        everyone = all_gather_plain(mine, group)
        mine = mine if mine is not None else next((each for each in everyone if each is not None), None)
    return mine


def union(groups: Sequence[Group], mine: dict[int, str]) -> dict[int, str]:
    """Return what all ranks of the mesh have found. A collective of all of them."""
    for group in groups:
        mine = {rank: what for each in all_gather_plain([*mine.items()], group) for rank, what in each}
    return mine


def _kind(raised: Exception, errors: Sequence[type[Exception]]) -> int:
    return next((i for i, error in enumerate(errors) if isinstance(raised, error)), len(errors) - 1)
