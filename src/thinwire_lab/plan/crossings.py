"""Measuring what crosses between stages, on the machines where the model will train."""

from collections.abc import Sequence
from statistics import median, median_low

import torch
from torch import Tensor

from thinwire.collectives import Group, Peers
from thinwire.exchanges import Link
from thinwire.pipeline.boundary import Boundary, TopKBoundary
from thinwire.planner.probe.links import Sent, fit, ladder
from thinwire.planner.probe.measure import Ranks, stamp
from thinwire.planner.probe.tiers import crossed
from thinwire_lab.plan.cuts import Crossings, Cut

_WARMUP, _REPEATS = 2, 7


def probe_crossings(
    activations: Sequence[Tensor],
    stages: Group,
    everyone: Group,
    *,
    density: float,
    micro_batches: int,
    seconds: float = 4.0,
) -> Crossings:
    """Measure links between neighbouring `stages`, and `TopKBoundary(density, values=bfloat16)` at each cut.

    activations: what each stage but the last sends for a micro-batch. A collective of `everyone`: all replicas of all
    stages, which measure at the same time. Every rank returns the means over them. Messages grow while a link's share
    of `seconds` lasts, and longer until their bytes take longer than the latency.
    """
    ranks = Ranks(group=everyone, device=activations[0].device)
    boundary = TopKBoundary(density, values=torch.bfloat16)
    cuts = [
        Cut(
            stage=stage,
            dense_bytes=x.nbytes,
            nbytes=boundary.nbytes(x.shape, x.dtype),
            codec=_codec(boundary, x, ranks),
            link=_link(stage, stages, ranks, seconds / len(activations)),
        )
        for stage, x in enumerate(activations)
    ]
    return Crossings(density=density, micro_batches=micro_batches, cuts=cuts)


def _codec(boundary: Boundary, x: Tensor, ranks: Ranks) -> float:
    """Return the seconds of sending and receiving, there and back."""
    ranks.mean([0.0])  # start together
    times = [_crossed(boundary, x) for _ in range(_WARMUP + _REPEATS)][_WARMUP:]
    (seconds,) = ranks.mean([median(times)])
    return seconds


def _crossed(boundary: Boundary, x: Tensor) -> float:
    x, gradient = x.detach().clone().requires_grad_(), torch.randn_like(x)
    before = stamp(x.device)
    torch.autograd.grad(boundary(x), x, gradient)
    return stamp(x.device).since(before)


def _link(stage: int, stages: Group, ranks: Ranks, seconds: float) -> Link:
    """Fit a link to messages that a stage and the next send each other at the same time. Other stages wait."""
    peers = Peers(stages, ranks.device)
    share = stages.size() / 2  # of all ranks, two of each replica's are at it
    peer = {stage: stage + 1, stage + 1: stage}.get(peers.rank)

    def send(size: int, runs: int) -> Sent:
        message = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
        times = [0.0] if peer is None else [crossed(peers, peer, message) for _ in range(runs)]
        (wall,) = ranks.mean([median_low(times)])
        return Sent(size, wall * share)

    return fit([(s.size, s.wall) for s in ladder(send, seconds)], None, 2)
