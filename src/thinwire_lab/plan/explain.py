"""Why are several hosts slower than one? What of a step is the network, and which one change helps most."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from thinwire.exchanges import AllReduce, Link
from thinwire.planner import Cost, Plan, Profile, step_seconds
from thinwire.planner.decide import TOLERANCE, winner
from thinwire.planner.profile import Island
from thinwire.planner.timeline import check_finite, works
from thinwire_lab.apart import SCHEMES, trained
from thinwire_lab.inputs import BadInput
from thinwire_lab.plan.report import Chapter
from thinwire_lab.plan.worker import Script
from thinwire_lab.show.table import Column, duration, human_bytes, milliseconds, tabulated

_WORTH = 0.05  # of a step: what a change must save
_FULL = 0.7  # of a rank's memory: activations need the rest
_SLOW = 10.0  # times computing: a step that takes longer is for outer steps
_EVERY = 30  # inner steps between outer ones


class Sent(NamedTuple):
    """A way to train: bytes that a rank sends in a step, seconds they take, those of coding them, and the step's.

    change: what to write for it, if anything. there: whether it is what the script does.
    """

    name: str
    nbytes: float
    exchange: float
    coding: float
    seconds: float
    change: str = ""
    there: bool = False


_COLUMNS: tuple[Column[Sent], ...] = (
    Column(heading="way to train", text=lambda way: f"{way.name}{' (now)' * way.there}", left=True),
    Column(heading="sends\na step", text=lambda way: human_bytes(way.nbytes)),
    Column(heading="exchange\nms", text=lambda way: milliseconds(way.exchange)),
    Column(heading="coding\nms", text=lambda way: milliseconds(way.coding)),
    Column(heading="step\nms", text=lambda way: milliseconds(way.seconds), rank=lambda way: way.seconds),
)


_NOTES = (
    "exchange: at the measured latency and bandwidth, if nothing hides it. coding: what encoding and decoding take on "
    "this machine. step: predicted, but for what the script does now, which was measured under torchrun.",
)


def explained(plan: Plan) -> Chapter:
    """Return what of a step is the network, the ways to train, and the one change that helps most. Raises as `sent`."""
    ways, alone = sent(plan), _alone(plan.profile)
    now, best = next(way for way in ways if way.there), _best(ways, alone)
    return Chapter(
        key="explained",
        table=tabulated(_COLUMNS, ways, title="Why are several hosts slower than one?", notes=_NOTES),
        conclusion=" ".join([*_symptom(plan, now), *plan.profile.made.get("settings", ()), _change(now, best)]),
        document={
            "share": _share(now, alone),
            "best": best.name,
            "change": best.change,
            "ways": [way._asdict() for way in ways],
        },
    )


def check_several(workers: int) -> None:
    """Raise BadInput for a single worker, who sends nothing."""
    if workers < 2:
        raise BadInput("--explain is about what crosses a network; expected 2 workers or more")


def sent(plan: Plan) -> Sequence[Sent]:
    """Return the ways to train, the least change first. Raises ValueError if there are none, as for a single worker."""
    profile = plan.profile
    check_several(profile.world_size)
    if not plan.dense_seconds:
        raise BadInput("by this profile a step takes 0 s, which leaves nothing to explain; expected more: measure anew")
    script = Script.of(profile) or Script(seconds=plan.dense_seconds)
    sharded = _Sharded(script, profile).ways() if script.modules else ()
    each = sorted([*_replicated(plan, script), *sharded], key=lambda way: not way.there)
    ways = [*each, _apart(profile, script)]
    for way in ways:
        check_finite(way.seconds, way.name)
    return ways


def _best(ways: Sequence[Sent], alone: float) -> Sent:
    """Return what helps most: what is there, if nothing does. Outer steps change training, and so come last."""
    *ways, apart = [way for way in ways if way.there or way.change or way is ways[-1]]
    best = ways[winner([way.seconds for way in ways], TOLERANCE)]  # within it, what changes less is named
    if best.seconds > (1 - _WORTH) * ways[0].seconds:
        best = ways[0]
    return apart if apart.change and best.seconds > max(_SLOW * alone, 2 * apart.seconds) else best


def _alone(profile: Profile) -> float:
    return profile.timeline.computed + profile.timeline.rest


def _share(now: Sent, alone: float) -> float:
    """Return what part of a step is the network: no more than the exchange takes there."""
    return max(0.0, min(now.exchange, now.seconds - alone)) / now.seconds


def _replicated(plan: Plan, script: Script) -> Iterator[Sent]:
    """Yield the ways of whole replicas. Where DDP was measured, predictions are scaled to that."""
    profile, there = plan.profile, not script.modules
    whole, scale = 4.0 * trained(profile), script.seconds / plan.dense_seconds if there else 1.0
    first = "" if there else "train in DistributedDataParallel, as each rank can hold the whole model"
    able = there or script.held <= _FULL * script.room
    native = _reduced("DDP in float32", profile, whole, scale * plan.dense_seconds)
    yield native._replace(there=there, change=first * able)
    if "bf16" in profile.costs:
        yield _reduced("DDP in 16 bits", profile, whole / 2, scale * step_seconds(profile, "bf16"))
    change = f"{first}{', and ' * (not there)}thinwire.attach(model, plan), with plan = thinwire.plan(model, step)"
    yield _planned(plan, scale * plan.seconds)._replace(change=change * (able and plan.pays))


def _reduced(name: str, profile: Profile, nbytes: float, seconds: float) -> Sent:
    ranks = profile.world_size
    exchange = AllReduce().seconds(nbytes, ranks, profile.links["all_reduce"])
    return Sent(name, 2 * (ranks - 1) / ranks * nbytes, exchange, 0.0, seconds)


def _planned(plan: Plan, seconds: float) -> Sent:
    """What the plan compresses is gathered, in a message to each rank for each bucket; the rest goes in a ring."""
    profile, others = plan.profile, plan.profile.world_size - 1
    dense = sum(row.nbytes for row in plan.rows if row.name not in plan.choice)
    gathered, link = others * (sum(row.nbytes for row in plan.rows) - dense), profile.links["all_gather"]
    parts = [part for bucket in profile.timeline.buckets for part in works(bucket, plan.choice, profile)]
    ring = _reduced("thinwire.attach as planned", profile, dense, seconds)
    buckets = len(profile.timeline.buckets) if gathered else 0
    exchange = gathered / link.bandwidth + others * link.latency * buckets + (ring.exchange if dense else 0.0)
    coding = sum(part.encode + part.decode for part in parts)
    return ring._replace(nbytes=ring.nbytes + gathered, exchange=exchange, coding=coding)


class _Part(NamedTuple):
    """One kind of exchange of a step: bytes that a rank sends, seconds, and those of coding."""

    nbytes: float
    exchange: float
    coding: float = 0.0

    def __add__(self, other: "_Part") -> "_Part":  # type: ignore[override]  # a sum, not a longer tuple
        return _Part(*(mine + more for mine, more in zip(self, other, strict=True)))


class _Sharded:
    """FSDP2's step on a network, and what compresses it."""

    def __init__(self, script: Script, profile: Profile) -> None:
        self._script, self._profile = script, profile
        alike = script.replicas == 1
        self._near = profile.links["all_gather"] if alike else script.near
        self._twice = 2 if profile.made.get("backend") == "gloo" else 1  # its reduce-scatter is an all-reduce
        self._plain = self._gathers(script.gathers, script.gathered) + self._scatters() + self._between()

    def ways(self) -> Iterator[Sent]:
        """Yield the script's step, and its step with each change: as much of an exchange is hidden as now.

        What a step takes beside computing and exchanges, which is FSDP's own, stays.
        """
        mine, alone = self._script, _alone(self._profile)
        waits = max(0.0, mine.seconds - alone)
        shown, alone = min(1.0, waits / (self._plain.exchange or 1.0)), alone + max(0.0, waits - self._plain.exchange)
        hsdp, narrow = mine.replicas > 1, mine.itemsize == 2

        def way(name: str, part: _Part, change: str = "") -> Sent:
            return Sent(name, *part, alone + shown * part.exchange + part.coding, change)

        kind = "HSDP" if hsdp else "FSDP2"
        yield way(f"{kind} in {'bfloat16' if narrow else 'float32'}", self._plain)._replace(there=True)
        if not narrow:
            half = self._gathers(mine.gathers, mine.gathered / 2) + self._scatters() + self._between()
            policy = "MixedPrecisionPolicy(param_dtype=torch.bfloat16) in fully_shard"
            yield way("the same in bfloat16", half, policy)
        recipe = self._profile.costs.get("qsgd")
        if recipe is None or not {"lossless", "differences"} <= self._profile.gathers.keys():
            return
        if hsdp:
            call = "thinwire.shard(model, thinwire.recipes.qsgd(), mesh=mesh{})"
            inner = self._gathers(mine.gathers, mine.gathered) + self._scatters()
            across = self._between(recipe)
            yield way("thinwire.shard, qsgd", inner + across, call.format(""))
            if mine.crossing:
                inner = self._differences() + self._scatters()
                more = ", gathers=thinwire.gathers.Differences()"
                yield way("the same, gathers=Differences()", inner + across, call.format(more))
            return
        yield from self._in_islands(recipe, way)
        call = "thinwire.scatter(model, thinwire.recipes.qsgd(), mesh=mesh, gathers=thinwire.gathers.{})"
        for name, gathers in (("Lossless()", self._lossless()), ("Differences()", self._differences())):
            yield way(f"thinwire.scatter, gathers={name}, qsgd", gathers + self._scatters(recipe), call.format(name))

    def _in_islands(self, recipe: Cost, way: Callable[..., Sent]) -> Iterator[Sent]:
        """Yield HSDP within islands of near ranks, if there are any."""
        mine, island = self._script, Island.of(self._profile.made)
        if island is None or island.ranks > mine.shards:
            return
        ranks = island.ranks
        links: dict[str, Any] = {"near": island.link, "between": self._profile.links["all_gather"]}
        inside = _Sharded(replace(mine, shards=ranks, replicas=mine.shards // ranks, **links), self._profile)
        part = inside._gathers(mine.gathers, mine.gathered) + inside._scatters() + inside._between(recipe, ranks)
        change = (
            f"HSDP: let fully_shard cut the model within each host of {ranks} ranks, and call "
            "thinwire.shard(model, thinwire.recipes.qsgd(), mesh=mesh) between hosts"
        )
        able = mine.held / ranks <= _FULL * mine.room
        yield way(f"HSDP in islands of {ranks}, thinwire.shard, qsgd", part, change * able)

    def _messages(self, count: float, nbytes: float, link: Link, times: float = 1.0) -> _Part:
        """Send so many messages with so many bytes in all to every other rank that holds the model."""
        others = times * (self._script.shards - 1)
        return _Part(others * nbytes, others * (count * link.latency + nbytes / link.bandwidth))

    def _gathers(self, count: float, nbytes: float) -> _Part:
        return self._messages(count, nbytes / self._script.shards, self._near)

    def _lossless(self) -> _Part:
        mine, cost = self._script, self._profile.gathers["lossless"]
        each = mine.gathered / mine.itemsize / mine.shards / mine.gathers
        part = self._messages(2 * mine.gathers, mine.gathers * cost.nbytes(each), self._near)
        return part._replace(coding=mine.gathers * (cost.encode(each) + cost.decode(each)))

    def _differences(self) -> _Part:
        """All trained parameters, once; a byte for each tensor ahead of them."""
        mine, cost = self._script, self._profile.gathers["differences"]
        each = trained(self._profile) / mine.shards / mine.modules
        part = self._messages(1 + mine.modules, mine.modules * cost.nbytes(each), self._near)
        return part._replace(coding=mine.modules * (cost.encode(each) + cost.decode(each)))

    def _scatters(self, recipe: Cost | None = None) -> _Part:
        """Return the reduce-scatter of gradients; with a recipe, each rank decodes its own shard of everybody's."""
        mine = self._script
        if recipe is None:
            return self._messages(mine.reductions, mine.reduced / mine.shards, self._near, self._twice)
        each = trained(self._profile) / mine.reductions
        part = self._messages(mine.reductions, mine.reductions * recipe.nbytes(each) / mine.shards, self._near)
        more = mine.reductions * recipe.exchange(each) / mine.shards
        coding = mine.reductions * (recipe.encode(each) + recipe.decode(each) / mine.shards)
        return part._replace(exchange=part.exchange + more, coding=coding)

    def _between(self, recipe: Cost | None = None, sharing: int = 1) -> _Part:
        """Return the exchange of shards between replicas. `sharing`: so many shards share a link."""
        mine, others, link = self._script, self._script.replicas - 1, self._script.between
        if others == 0:
            return _Part(0.0, 0.0)
        if recipe is None:
            each = mine.reduced / mine.shards
            seconds = mine.reductions * AllReduce().seconds(each / mine.reductions, mine.replicas, link)
            return _Part(2 * others / mine.replicas * each, seconds)
        each = trained(self._profile) / mine.shards / mine.reductions
        nbytes = others * mine.reductions * recipe.nbytes(each)
        seconds = others * mine.reductions * link.latency + sharing * nbytes / link.bandwidth
        return _Part(nbytes, seconds, mine.reductions * (recipe.encode(each) + recipe.decode(each)))


def _apart(profile: Profile, script: Script) -> Sent:
    """Return outer steps, which take whole replicas."""
    scheme = SCHEMES["streaming_diloco"]
    nbytes, seconds = scheme.nbytes(profile, _EVERY), scheme.seconds(profile, _EVERY)
    others, link = profile.world_size - 1, profile.links["all_gather"]
    change = (
        f"thinwire.outer(model, optimizer, thinwire.outer_steps.streaming_diloco(every={_EVERY})), as this network is "
        "too slow for exchanges at each step; it may cost some loss"
    )
    fits = script.held <= _FULL * script.room
    exchange = others * (scheme.fragments * link.latency / _EVERY + nbytes / link.bandwidth)
    return Sent(f"outer steps, H {_EVERY}", others * nbytes, exchange, 0.0, seconds, change if fits else "")


def _symptom(plan: Plan, now: Sent) -> Iterator[str]:
    """Yield what a step takes, and what of it crosses the network."""
    alone, script = _alone(plan.profile), Script.of(plan.profile)
    share = _share(now, alone)
    took = "takes" if script else "is predicted to take"
    yield f"A step {took} {_time(now.seconds)}, computing alone {_time(alone)}: the network is {share:.0%} of it."
    if script is None or not script.modules:
        yield f"DDP sends {human_bytes(now.nbytes)} of gradients from each rank."
    elif script.crossing:
        across = "the slow link" if "island" in plan.profile.made else "the network"
        yield (
            f"FSDP gathers parameters across {across}, as {script.shards} ranks hold the model together: each "
            f"sends {human_bytes(now.nbytes)} a step, gradients included."
        )
    else:
        yield f"FSDP gathers parameters among {script.shards} near ranks; only gradients cross the slow link."


def _change(now: Sent, best: Sent) -> str:
    if best is now:
        return "Nothing here would save more than 5 % of it: leave it as it is."
    faster = f"{now.seconds / best.seconds:.1f} times as fast"
    coding = f", of which coding takes {_time(best.coding)}" if best.coding > _WORTH * best.seconds else ""
    return f"What helps most: {best.change}. A step should then take {_time(best.seconds)}{coding}: {faster}."


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{milliseconds(seconds)} ms"
