"""The central copy of the parameters, how updates are applied to it, and when."""

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from thinwire.errors import ServerError, StateError
from thinwire.outer_steps import MakeOptimizer, check_settings, made_optimizer
from thinwire.payloads import Blocks, Payload
from thinwire.waits import all_finite
from thinwire.wire.frames import Flag, Frame
from thinwire.wire.layout import Entry, Layout, Part, Places, difference

logger = logging.getLogger("thinwire")
_BACK = 1.0  # seconds in which a trainer whose connection broke joins again
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class Update(NamedTuple):
    """One update of a trainer: its number, the version it was computed on, and what it says."""

    trainer: str
    number: int
    version: int
    parts: Sequence[Part]
    payloads: Sequence[Payload]
    rows: Sequence[Blocks]


def read_update(layout: Layout, trainer: str, frame: Frame) -> Update:
    """Return the update in a frame. Raises FrameError or PayloadError if there is none in it."""
    parts = layout.dense if frame.flags & Flag.DRAINED else layout.up(frame.number)
    payloads, rows = layout.read(frame.body, parts, layout.rows, frame.number)
    return Update(trainer, frame.number, frame.version, parts, payloads, rows)


@final
class Central:
    """Parameters, as views of one flat vector for each dtype, and their optimizers; the caller holds the server's lock.

    `damped`: an update of staleness τ is multiplied by 1/(1 + τ) (Zhang et al. 2016, staleness-aware asynchronous SGD).
    `sound`: the latest version on which gradients have been finite.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        make_optimizer: MakeOptimizer,
        make_rows_optimizer: MakeOptimizer | None,
        make_scheduler: MakeScheduler | None,
        *,
        damped: bool,
    ) -> None:
        self.layout, self._model, self.places = layout, model, Places(layout, model)
        self.parameters, self.flats = self.places.parameters, self.places.flats
        self._gradients, self._views = layout.flats()
        self.optimizers = self._made(make_optimizer, make_rows_optimizer)
        self._rates = [[float(group.get("lr", 0)) for group in each.param_groups] for each in self.optimizers]
        self._schedulers = [_scheduler(make_scheduler, each) for each in self.optimizers] if make_scheduler else []
        self._damped = damped
        self.version = self.dropped = self.sound = 0
        self.failure = ""  # why nothing can be applied any more; parameters are then between two steps
        self.applied: dict[str, int] = {}
        self.life, self.restored = secrets.randbits(64), 0
        self.present = set[str]()  # trainers that are there, or were when this was saved
        self.pace = 0  # the slowest trainer's, or of the last ones that were there
        self.staleness: Counter[int] = Counter()
        self.behind: Counter[str] = Counter()  # of each trainer's updates, added up; since the server was started
        self.changed = {each.name: torch.zeros(each.shape[0], dtype=torch.int64) for each in self.layout.rows}

    def _made(self, make: MakeOptimizer, make_of_rows: MakeOptimizer | None) -> list[torch.optim.Optimizer]:
        rows = [self.parameters[each.name] for each in self.layout.rows]
        others = [self.parameters[segment.name] for _, segment in self.layout.segments]
        made = [made_optimizer(make, others)] if others else []
        if rows:
            made.append(made_optimizer(make_of_rows or make, rows))
            kind, groups = type(made[-1]).__name__, made[-1].param_groups
            settings = [(each, group.get(each)) for group in groups for each in ("momentum", "weight_decay")]
            if moving := [f"{name}={value}" for name, value in settings if value]:  # trainers get no other rows
                raise ValueError(
                    f"{kind} has {moving[0]}, which moves rows of sparse embeddings that got no gradient; expected 0: "
                    "pass make_rows_optimizer=, such as SparseAdam or Adagrad"
                )
        return made

    @torch.no_grad()
    def apply(self, updates: Sequence[Update]) -> set[str]:
        """Apply the mean of these updates in one step, and return the trainers whose update was not finite."""
        self.check()
        stale = {each.trainer: max(0, self.version - each.version) for each in updates}
        self.applied.update({each.trainer: each.number for each in updates})
        good = self._gathered(updates, stale)
        self.sound = max((self.sound, *(min(each.version, self.version) for each in good)))
        self.staleness.update(stale[each.trainer] for each in good)
        self.behind.update(stale)
        self.dropped += len(updates) - len(good)
        if good:
            self._step()
        return {each.trainer for each in updates} - {each.trainer for each in good}

    def check(self) -> None:
        """Raise ServerError if a step has failed."""
        if self.failure:
            raise ServerError(self.failure)

    def _gathered(self, updates: Sequence[Update], stale: Mapping[str, int]) -> list[Update]:
        """Make the mean of all finite updates the gradients, and return these updates."""
        good = list[Update]()
        weights = {who: 1 / (1 + each) if self._damped else 1.0 for who, each in stale.items()}
        share = 1 / len(updates)  # of each, before they are added: a sum may leave the range of 16 bits
        for update in sorted(updates, key=lambda each: each.trainer):  # the same sum whoever comes first
            into = self._gradients if not good else {d: torch.empty_like(x) for d, x in self._gradients.items()}
            if not _written(update, into):
                continue
            for dtype, x in into.items():
                if (factor := weights[update.trainer] * share) != 1:
                    x.mul_(factor)
                if good:
                    self._gradients[dtype].add_(x)
            good.append(update)
        if 0 < len(good) < len(updates):
            for x in self._gradients.values():
                x.mul_(len(updates) / len(good))
        for i, entry in enumerate(self.layout.rows if good else ()):
            some = [each.rows[i] for each in good]
            scaled = [each.rows[i].values * (weights[each.trainer] / len(good)) for each in good]
            keys, values = torch.cat([each.keys.long() for each in some])[None], torch.cat(scaled)
            values, one = values.view(-1, *entry.shape[1:]), len(good) == 1
            gradient = torch.sparse_coo_tensor(keys, values, entry.shape, is_coalesced=one, check_invariants=False)
            self.parameters[entry.name].grad = gradient.coalesce()
        return good

    def _step(self) -> None:
        """Take a step along the gradients. Raises ServerError if it fails: then nothing is applied any more."""
        try:
            self.places.check(self._model)
            for name, gradient in self._views.items():
                self.parameters[name].grad = gradient
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in self._schedulers:
                scheduler.step()
            self.version += 1
            moved = [*self.flats.values(), *map(self._moved, self.layout.rows)]
            if not all_finite(moved):
                raise StateError(
                    "its parameters are not finite after this step, so training has diverged. Start it again from its "
                    "latest checkpoint, or from the .previous one, with a lower learning rate"
                )
        except Exception as error:
            why = f"the server has stopped at version {self.version}: {error}"
            if not isinstance(error, StateError):
                why = (
                    f"the server's optimizer or scheduler raised {type(error).__name__}: {error}; start it again with "
                    "one that can take these gradients (for sparse embeddings pass make_rows_optimizer=, such as "
                    "SparseAdam)"
                )
            self.failure = why
            logger.error("%s. No further updates are applied or saved", why)
            raise ServerError(why) from error

    def _moved(self, entry: Entry) -> Tensor:
        """Note which rows a step has changed, drop their gradient, and return copies of them."""
        p = self.parameters[entry.name]
        assert p.grad is not None
        keys, p.grad = p.grad.indices()[0], None
        self.changed[entry.name].index_fill_(0, keys, self.version)
        return self.picked(entry, keys)

    def changed_since(self, entry: Entry, version: int) -> tuple[Tensor, Tensor]:
        """Return which rows have changed after `version`, and copies of them."""
        keys = (self.changed[entry.name] > version).nonzero().view(-1)
        return keys, self.picked(entry, keys)

    def picked(self, entry: Entry, keys: Tensor) -> Tensor:
        """Return copies of these rows, which must be there."""
        return self.parameters[entry.name].detach().index_select(0, keys)

    def state(self) -> dict[str, Any]:
        """Return copies of everything that must outlive the server: tensors and plain containers."""
        states = {
            "parameters": self.parameters,
            "optimizers": [each.state_dict() for each in self.optimizers],
            "schedulers": [each.state_dict() for each in self._schedulers],
            "changed": self.changed,
        }
        names = {"schedules": [*map(_named, self._schedulers)]}
        numbers = {"version": self.version, "dropped": self.dropped, "applied": dict(self.applied)}
        rest = {"present": sorted(self.present), "pace": self.pace, "staleness": dict(self.staleness)}
        rest["rates"] = self._rates
        return tree_map(_copied, states) | names | numbers | rest

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state` returned. Raises StateError if other parameters or optimizers saved it."""
        self._check(saved)
        for name, p in self.parameters.items():
            p.copy_(saved["parameters"][name])
        for each, state in zip(self.optimizers, saved["optimizers"], strict=True):
            each.load_state_dict(state)
        for scheduler, state in zip(self._schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self._follow(saved.get("rates", self._rates))
        self.version = self.restored = self.sound = saved["version"]
        self.dropped, self.applied, self.staleness = saved["dropped"], {**saved["applied"]}, Counter(saved["staleness"])
        self.present, self.pace = set(saved.get("present", ())), saved.get("pace", 0)
        for name, x in self.changed.items():
            x.copy_(saved["changed"][name])

    def _follow(self, earlier: Sequence[Sequence[float]]) -> None:
        """Go on at the learning rates that optimizers were made with, where these changed; schedules in proportion."""
        for i, optimizer in enumerate(self.optimizers):
            bases = [each.base_lrs for each in _nested(self._schedulers[i : i + 1]) if hasattr(each, "base_lrs")]
            for j, (now, then) in enumerate(zip(self._rates[i], earlier[i], strict=True)):
                if now != then:
                    group = optimizer.param_groups[j]
                    group["lr"] = now * (group["lr"] / then if then else 1)
                    for each in bases:
                        each[j] = now * (each[j] / then if then else 1)

    def _check(self, saved: Mapping[str, Any]) -> None:
        mine = {"parameters": self.parameters, "optimizers": self.optimizers, "schedulers": self._schedulers}
        if found := difference(_words(mine), _words(saved)):
            raise StateError(
                "{0} is {2} in the checkpoint and {1} on this server: serve the model that was saved, with the same "
                "arguments, or use another checkpoint".format(*found)
            )
        for each, state in zip(self.optimizers, saved["optimizers"], strict=True):
            check_settings(state["param_groups"], each, StateError)
        made = [*map(_named, self._schedulers)]
        for here, there in zip(made, saved.get("schedules", made), strict=True):
            if here != there:
                raise StateError(
                    f"the checkpoint has the state of a learning-rate scheduler {there}, and make_scheduler makes a "
                    f"{here}: pass the make_scheduler that it was saved with, or use another checkpoint"
                )


def _scheduler(make: MakeScheduler, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    made: object = make(optimizer)
    if not isinstance(made, torch.optim.lr_scheduler.LRScheduler) or "metrics" in signature(made.step).parameters:
        raise TypeError(
            f"make_scheduler made a {type(made).__name__}; expected one of torch.optim.lr_scheduler's that steps "
            "without metrics, as in make_scheduler=lambda optimizer: StepLR(optimizer, step_size=1000)"
        )
    return made


def _named(scheduler: Any) -> str:
    """Return the name of its class, with those of the schedulers that it consists of."""
    parts = ", ".join(map(_named, getattr(scheduler, "_schedulers", ())))
    return f"{type(scheduler).__name__}({parts})" if parts else type(scheduler).__name__


def _nested(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield all of them, and those that they consist of."""
    for each in schedulers:
        yield each
        yield from _nested(getattr(each, "_schedulers", ()))


def _written(update: Update, into: Mapping[torch.dtype, Tensor]) -> bool:
    """Write an update's gradients. Return whether all of it is finite."""
    for part, payload in zip(update.parts, update.payloads, strict=True):
        payload.write(into[part.dtype])
        if not payload.is_finite(into[part.dtype]):
            return False
    return all_finite(rows.values for rows in update.rows)


def _words(state: Mapping[str, Any]) -> dict[str, str]:
    """Say in words what a checkpoint and its server must have in common."""
    words = {f"parameter {name}": f"{tuple(x.shape)} {x.dtype}" for name, x in state["parameters"].items()}
    return words | {f"the number of {each}": str(len(state[each])) for each in ("optimizers", "schedulers")}


def _copied(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone()
    return x.item() if isinstance(x, np.generic) else x  # a rate from np.exp, which torch.load would refuse


@final
class Rule:
    """Decides over the updates of all trainers, of which so many must have joined before the first is applied.

    At a `staleness` of 0, the mean of one update of each live trainer, and of who vanished just now, is applied in one
    step; who was away for longer catches up alone. Otherwise updates are applied as they come, and no trainer is over
    `staleness` ahead (stale-synchronous parallel, Ho et al. 2013).

    A trainer has one update here at a time. The caller holds the server's lock, and calls `release` after each call.
    `timeout`: how long a rule that keeps trainers in step waits, after a restart, for those that were there; how long
    a trainer that vanished has to come back.
    """

    def __init__(self, central: Central, *, trainers: int, timeout: float, staleness: int | None) -> None:
        self.central, self._wanted, self.live = central, trainers, dict[str, int]()
        self._together, self._bound = staleness == 0, math.inf if staleness is None else max(1, staleness)
        self.patience, now = timeout, time.monotonic()
        self._goodbyes, self._begun = set[str](), bool(central.applied)
        self._lost = {"": now} if central.applied else dict[str, float]()
        """When each trainer left that has not said BYE or come back, and when the server itself came back."""
        self._held, self._applied = dict[str, Update](), dict[str, bool]()
        """Updates that are not applied yet, and of those that are and are not answered, whether they were dropped."""
        self._returning, self._until = set[str](() if staleness is None else central.present), now + timeout

    @property
    def complete(self) -> bool:
        """Whether as many trainers as are wanted have been there at one time, and are back after a restart."""
        return self._begun and not self._returning

    @property
    def ended(self) -> bool:
        """Whether something was trained, and all have left for good."""
        trained = self._goodbyes or self.central.applied
        away = time.monotonic() - max(self._lost.values(), default=-math.inf)
        return bool(self.complete and trained and not self.live and away > self.patience)

    def joined(self, trainer: str, ahead: int | None, sent: int, slack: int) -> int:
        """Count a trainer in at the pace that it has, or the slowest's, if it has none or is below that by `slack`.

        Where nobody is, as after a restart, that is the last one: others come back with theirs, and would wait.
        A pace is the number of the trainer's latest update, and by how much it is `ahead` of that. What it has `sent`
        will come again where it is not applied, and counts: a server that started again may not know the trainer.
        Returned is that: servers of which each had one of its own would wait for trainers that wait for each other.
        """
        number = self.central.applied.get(trainer, 0)
        slowest = min(self.live.values(), default=self.central.pace) - max(sent, number)
        if ahead is None or slowest > ahead + slack:
            ahead = slowest
        self.live[trainer] = ahead + number
        self._begun |= len(self._goodbyes | self.live.keys()) >= self._wanted
        self._returning.discard(trainer)
        self._lost.pop(trainer, None)
        return ahead

    def left(self, trainer: str, *, goodbye: bool) -> None:
        """Wait for this trainer no longer. If it did not say BYE it may come back, and send what was not applied."""
        for each in (self.live, self._applied, self._held):
            each.pop(trainer, None)
        self._goodbyes |= {trainer} if goodbye else set()
        self._lost |= {} if goodbye else {trainer: time.monotonic()}

    def submit(self, update: Update) -> None:
        """Take an update, which is the next of its trainer."""
        self._held[update.trainer] = update

    def release(self) -> dict[str, bool]:
        """Apply what may be applied. Return whose update can be answered, and whether it was dropped as not finite.

        Raises ServerError if a step fails.
        """
        if self._returning and time.monotonic() > self._until:
            self._returning.clear()  # the next restart does not wait for them either
        self.central.present = {*self.live, *self._returning}
        least = min(self.live.values(), default=0)
        due = [each for who, each in self._held.items() if self.live[who] - least < self._bound]
        if self.complete and not self._together:
            for each in due:
                self._apply([each])
        elif self.complete and due and self._held.keys() >= self._awaited(least):
            self._apply(due)
        least = self.central.pace = min(self.live.values(), default=self.central.pace)
        return {who: self._applied.pop(who) for who in [*self._applied] if self.live[who] - least < self._bound}

    def _awaited(self, least: int) -> set[str]:
        """Return the slowest, and who vanished just now, as one whose connection broke is soon back."""
        lost = time.monotonic() - min(_BACK, self.patience)
        slowest = {who for who, pace in self.live.items() if pace == least}
        return slowest | {who for who, when in self._lost.items() if when > lost}

    def _apply(self, updates: list[Update]) -> None:
        dropped = self.central.apply(updates)
        for who in (each.trainer for each in updates):
            del self._held[who]
            self.live[who] += 1
            self._applied[who] = who in dropped

    def late(self, hosts: Mapping[str, str]) -> str:
        """Return in words who is waited for; `hosts`: where each is."""
        if not self._begun:
            more = self._wanted - len(self._goodbyes | self.live.keys())
            return f"{more} more to join: serve has trainers={self._wanted}"
        if not self.complete:
            return f"{len(self._returning)} to return, which were connected when this server was saved"
        least, applied = min(self.live.values(), default=0), self.central.applied
        slowest = {who for who, count in self.live.items() if count == least}
        late = sorted(slowest - self._held.keys() or slowest)
        names = (f"{each[:8]} at {hosts.get(each)} (latest update {applied.get(each, 0)})" for each in late)
        return f"{', '.join(names)}: slow, or its gradients are not finite and it skips them"
