"""What workers send each other in an outer step: one message, which says how much its sender's share counts.

Beside Δ it carries the running statistics of batch normalisation, which no optimizer trains.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.futures import Future

from thinwire.collectives import Group, Pool, all_gather, plain_device

_log = logging.getLogger("thinwire")
_RUNNING = ("running_mean", "running_var")


@final
class Meeting:
    """An exchange under way: what has been put into its pool travels with this worker's tick and weight.

    `weight`: its samples; 0 if this worker has learnt nothing, and NaN if its Δ is not finite. `refusal`: the number of
    what is wrong with this worker, 0 for nothing. All read it, and where somebody refuses nobody's share counts.

    `taken`: whether this worker's share is in the sum. Where workers come and go, that is None until it is decided.
    `senders`: whose shares have arrived, by rank or, there, by name.
    """

    def __init__(self, pool: Pool, group: Group, tick: int, weight: float, refusal: int = 0) -> None:
        self._pool, self._device, self.tick, self.weight = pool, plain_device(group), tick, weight
        self.taken: bool | None = True
        self.senders: Sequence[int | str] = range(group.size())
        words = torch.tensor([tick, weight, refusal], dtype=torch.float64, device=self._device)
        self._words: Future[Tensor] = pool.gather(words)

    @property
    def message(self) -> Tensor:
        """What this worker sends."""
        return self._pool.message(self._device)

    def begin(self, group: Group) -> None:
        """Send everything to all ranks of a group."""
        mine = self.message
        rows = mine.new_empty(group.size(), mine.numel())

        def arrived(done: "Future[Any]") -> None:
            try:
                done.value()
                self._pool.deliver(rows)
            except Exception as error:
                self._pool.fail(error)

        all_gather(rows.view(-1), mine, group).then(arrived)

    def arrive(self, messages: Mapping[str, bytes], *, taken: bool) -> None:
        """Take what was decided on, by sender."""
        self.taken, self.senders = taken, list(messages)
        rows = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in messages.values()]
        self._pool.deliver(torch.stack(rows).to(self._device))

    def fail(self) -> None:
        """Give it up."""
        self.taken = False
        self._pool.fail(RuntimeError("the others have gone on"))

    @cached_property
    def _said(self) -> Sequence[Sequence[float]]:
        """Each worker's weight and refusal, once all have arrived. Raises RuntimeError if workers differ in step."""
        ticks, *said = self._words.wait().T.tolist()
        if len(set(ticks)) > 1:
            each = [int(tick) for tick in ticks]
            raise RuntimeError(f"workers are at different ticks ({each}): load the state of the same step on all")
        return said

    @property
    def weights(self) -> Sequence[float]:
        """How much each worker's share counts."""
        return [0.0 if self.refusals or math.isnan(each) else each for each in self._said[0]]

    @property
    def refusals(self) -> dict[int, int]:
        """What is wrong with workers, by rank."""
        return {rank: int(number) for rank, number in enumerate(self._said[1]) if number}

    @property
    def sick(self) -> list[int | str]:
        """Those whose Δ is not finite."""
        return [who for who, each in zip(self.senders, self._said[0], strict=True) if math.isnan(each)]


@final
class Sick:
    """Workers whose Δ was not finite. `times`: how often, by sender. `skipped`: outer steps that all have skipped."""

    def __init__(self) -> None:
        self.times, self.skipped = Counter[int | str](), 0

    def leave_out(self, who: Sequence[int | str], group: Group) -> None:
        """Note that these workers were left out of the mean."""
        self.times.update(who)
        if any(map(_worth_saying, map(self.times.get, who))):
            _log.log(_level(who, group), "%s: left out of the outer step", self._named(who))

    def skip(self, who: Sequence[int | str], group: Group) -> None:
        """Note that all workers skipped the outer step."""
        self.times.update(who)
        self.skipped += 1
        if _worth_saying(self.skipped):
            named = self._named(who) if who else "the mean of all workers is not finite, though each one's Δ is"
            _log.log(_level(who, group), "%s: nobody took the outer step (%d skipped so far)", named, self.skipped)

    def _named(self, who: Sequence[int | str]) -> str:
        return ", ".join(f"Δ of worker {each} is not finite (time {self.times[each]})" for each in who)


def _worth_saying(times: int | None) -> bool:
    return str(times).strip("0") == "1"  # the first time, the tenth, the hundredth


def _level(who: Sequence[int | str], group: Group) -> int:
    return logging.WARNING if group.rank() in (0, *who) else logging.DEBUG


@final
class RunningStatistics:
    """The buffers of a model that hold running means and variances. `agreed`: what they were when workers last met."""

    def __init__(self, model: nn.Module) -> None:
        held = [(path, module, name) for path, module in model.named_modules() for name in _RUNNING]
        self._held = [each for each in held if each[1]._buffers.get(each[2]) is not None]
        self.agreed = [module.get_buffer(name).clone() for _, module, name in self._held]
        self._arriving: list[Future[Tensor]] = []
        self._others = [(each, name) for each in model.modules() for name in each._buffers if name not in _RUNNING]

    @property
    def tensors(self) -> list[Tensor | None]:
        """The buffers that are the model's now: `to()`, for one, replaces them. None for what is none any more."""
        found = [module._buffers.get(name) for _, module, name in self._held]
        return [
            x if x is not None and x.shape == agreed.shape else None
            for x, agreed in zip(found, self.agreed, strict=True)
        ]

    @property
    def missing(self) -> int:
        """The number, from 1, of the first buffer that the model has no more; 0 if it has all."""
        return next((number for number, x in enumerate(self.tensors, 1) if x is None), 0)

    def described(self, number: int) -> str:
        """Return what is wrong where this buffer is `missing`."""
        path, _, name = self._held[number - 1]
        return (
            f"the buffer {f'{path}.{name}'.lstrip('.')!r} is gone, or is not of shape "
            f"{tuple(self.agreed[number - 1].shape)} any more; expected the running statistics with which outer steps "
            "began, as workers average them: put it back; or remove() this handle on every worker, turn running "
            "statistics off on all, and make another"
        )

    def share(self, pool: Pool) -> None:
        """Have them travel with an outer step."""
        pairs = zip(self.tensors, self.agreed, strict=True)
        self._arriving = [pool.gather((agreed if x is None else x).clone()) for x, agreed in pairs]

    @torch.no_grad()
    def average(self) -> None:
        """Replace each by its mean over workers where it is finite, or by what it was if it is nowhere."""
        means, self._arriving = self._means(), []
        for x, agreed, mean in zip(self.tensors, self.agreed, means, strict=False):
            agreed.copy_(mean)
            if x is not None:
                x.copy_(agreed)

    def _means(self) -> list[Tensor]:
        """Return what `average` makes of them, if anything has arrived."""
        rows = [[row for row in future.wait().double() if bool(row.isfinite().all())] for future in self._arriving]
        return [torch.stack(sound).mean(0) if sound else x for x, sound in zip(self.agreed, rows, strict=False)]

    def state(self, *, arrived: bool) -> dict[str, Tensor]:
        """Return copies of what workers agreed on and, once that has `arrived`, of what they will agree on next."""
        found = {f"agreed {i}": x for i, x in enumerate(self.agreed)}
        found |= {f"next {i}": x for i, x in enumerate(self._means())} if arrived else {}
        return {name: x.clone() for name, x in found.items()}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned, where it fits. The model's own stay as they are."""
        self._arriving = []
        for i, agreed in enumerate(self.agreed):
            found = ((what, saved.get(f"{what} {i}")) for what in ("agreed", "next"))
            fits = {what: x for what, x in found if x is not None and x.shape == agreed.shape}
            agreed.copy_(fits.get("agreed", agreed))
            if "next" in fits:
                self._arriving.append(Future())
                self._arriving[-1].set_result(fits["next"][None])

    @property
    def others(self) -> list[Tensor | None]:
        """The model's other buffers, which are each worker's own once it has those of another one."""
        return [module._buffers.get(name) for module, name in self._others]

    @torch.no_grad()
    def take_others(self, theirs: Iterable[Tensor | None]) -> None:
        """Take over another worker's, as far as they still have the shape they began with."""
        for x, other in zip(self.others, theirs, strict=True):
            if x is not None and other is not None and x.shape == other.shape:
                x.copy_(other)

    @torch.no_grad()
    def take(self, theirs: Iterable[Tensor | None]) -> None:
        """Take over another worker's."""
        for x, agreed, other in zip(self.tensors, self.agreed, theirs, strict=True):
            if x is not None and other is not None:
                x.copy_(other)
                agreed.copy_(x if bool(x.isfinite().all()) else agreed)
