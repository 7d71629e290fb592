"""Are some ranks nearer than others?"""

from statistics import median_low
from typing import NamedTuple

import torch

from thinwire.collectives import Group, Peers
from thinwire.exchanges import Link
from thinwire.planner.probe.links import USUAL, Sent, fit, ladder, told
from thinwire.planner.probe.measure import hosts, longest, timed

_SIZES = (1 << 8, 1 << 18)  # bytes, at which tiers are compared
_SECONDS = 0.5  # for the pairs at one distance
_APART = 3.0  # times slower: another tier


class Tier(NamedTuple):
    """Groups of `size` neighbouring ranks, whose messages see `link`; `told`: its bandwidth could be told."""

    size: int
    link: Link
    same_host: bool
    told: bool = True


def probe_tiers(group: Group, device: torch.device) -> list[Tier]:
    """Return tiers, the nearest first, of ranks numbered host by host, as torchrun does; a collective."""
    every = hosts(group, device)
    strides = [1 << bit for bit in range((group.size() - 1).bit_length())]
    found = [(stride, _pairs(stride, group, device)) for stride in strides]
    tiers: list[Tier] = []
    for stride, (link, seen) in found:
        together = all(every[i] == every[i ^ stride] for i in range(len(every)) if i ^ stride < len(every))
        tier = Tier(min(2 * stride, group.size()), link, together, seen)
        if tiers and all(link.seconds(size) <= _APART * tiers[-1].link.seconds(size) for size in _SIZES):
            near = tiers.pop()
            tier = near._replace(size=tier.size, same_host=near.same_host and together)
        tiers.append(tier)
    return tiers


def described(tiers: list[Tier]) -> list[str]:
    """Return a line for each tier."""
    return [
        f"groups of {tier.size} ranks {'on one host' if tier.same_host else 'across hosts'}: latency "
        f"{1e3 * tier.link.latency:.2f} ms, bandwidth {'' if tier.told else 'at least '}"
        f"{8e-6 * tier.link.bandwidth:.0f} Mbit/s"
        for tier in tiers
    ]


def _pairs(stride: int, group: Group, device: torch.device) -> tuple[Link, bool]:
    """Return the link of the slowest pair of ranks at this distance, and whether bytes told in it."""
    peers = Peers(group, device)
    peer = peers.rank ^ stride

    def send(size: int, runs: int) -> Sent:
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        longest(0.0, group, device)
        taken = [0.0] if peer >= peers.world_size else [crossed(peers, peer, message) for _ in range(runs)]
        return Sent(size, longest(median_low(taken), group, device))

    sent = ladder(send, _SECONDS, USUAL)
    return fit([(s.size, s.wall) for s in sent], None, 2), told([s.wall for s in sent])


def crossed(peers: Peers, peer: int, message: torch.Tensor) -> float:
    """Return the seconds in which this rank and another swap a message."""
    return timed(lambda: peers.cross({peer: message}, {peer: message.numel()}), message.device)
