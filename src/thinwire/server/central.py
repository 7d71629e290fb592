"""The central copy of the parameters, and how updates are applied to it."""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from thinwire.errors import ServerError, StateError
from thinwire.integrations.training.drift import difference
from thinwire.outer_steps import MakeOptimizer, check_settings, made_optimizer
from thinwire.payloads import Blocks, Payload
from thinwire.waits import all_finite
from thinwire.wire.frames import Flag, Frame
from thinwire.wire.layout import Layout, Part, Places
from thinwire.wire.parameters import Entry

logger = logging.getLogger("thinwire")
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
        self.changed = {
            each.name: torch.zeros(each.shape[0], dtype=torch.int64, device="cpu") for each in self.layout.rows
        }

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
