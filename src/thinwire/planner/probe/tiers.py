"""Are some ranks nearer than others?"""

import socket
import zlib
from statistics import median
from typing import NamedTuple

import torch

from thinwire.collectives import Group, Peers
from thinwire.exchanges import Link
from thinwire.planner.probe.measure import gathered, longest, stamp

_SIZES = (1 << 8, 1 << 18)  # bytes
_REPEATS = 5
_APART = 3.0  # times slower: another tier


class Tier(NamedTuple):
    """Groups of `size` neighbouring ranks; messages within see `link`. `same_host`: whether a group shares a host."""

    size: int
    link: Link
    same_host: bool


def probe_tiers(group: Group, device: torch.device) -> list[Tier]:
    """Return tiers, the nearest first: a single one where all ranks are about equally far. A collective.

    Rank i sends to i XOR 1, 2, 4, …: we assume ranks are numbered host by host, as torchrun does.
    """
    host = float(zlib.crc32(socket.gethostname().encode()))
    hosts = gathered([host], group, device)[:, 0].tolist()
    found = [(stride, _pairs(stride, group, device)) for stride in _strides(group.size())]
    tiers: list[Tier] = []
    for stride, link in found:
        together = all(hosts[i] == hosts[i ^ stride] for i in range(len(hosts)) if i ^ stride < len(hosts))
        tier = Tier(min(2 * stride, group.size()), link, together)
        if tiers and not _farther(link, tiers[-1].link):
            tier = Tier(tier.size, tiers[-1].link, tiers[-1].same_host and together)
            tiers.pop()
        tiers.append(tier)
    return tiers


def described(tiers: list[Tier]) -> list[str]:
    """Return a line for each tier."""
    return [
        f"groups of {tier.size}, {'same host' if tier.same_host else 'other hosts'}: "
        f"{1e3 * tier.link.latency:.2f} ms, {8e-6 * tier.link.bandwidth:.0f} Mbit/s"
        for tier in tiers
    ]


def _strides(world_size: int) -> list[int]:
    return [1 << bit for bit in range((world_size - 1).bit_length())]


def _farther(link: Link, than: Link) -> bool:
    return any(link.seconds(size) > _APART * than.seconds(size) for size in _SIZES)


def _pairs(stride: int, group: Group, device: torch.device) -> Link:
    """Return the link of the slowest pair of ranks at this distance."""
    seconds = [_longest_swap(size, stride, group, device) for size in _SIZES]
    slope = max((seconds[1] - seconds[0]) / (_SIZES[1] - _SIZES[0]), 1e-12)
    return Link(latency=seconds[0], bandwidth=1 / slope)


def _longest_swap(size: int, stride: int, group: Group, device: torch.device) -> float:
    peers = Peers(group, device)
    peer = peers.rank ^ stride
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    taken = [0.0]
    longest(0.0, group, device)
    if peer < peers.world_size:
        taken = [_swap(peers, peer, message, device) for _ in range(_REPEATS)]
    return longest(median(taken), group, device)


def _swap(peers: Peers, peer: int, message: torch.Tensor, device: torch.device) -> float:
    before = stamp(device)
    peers.cross({peer: message}, {peer: message.numel()})
    return stamp(device).since(before)
