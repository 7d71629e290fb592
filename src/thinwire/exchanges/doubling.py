"""Sparse recursive doubling with a switch to dense."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor
from typing_extensions import override

from thinwire.collectives import Group, Peers
from thinwire.exchanges.base import Exchanged, Hops
from thinwire.exchanges.merging import Rounds, complete_bytes, together
from thinwire.payloads import Dense, Keyed, wire
from thinwire.payloads.keyed import merged, spread


@final
@dataclass(frozen=True, kw_only=True)
class RecursiveDoubling(Rounds):
    """Swap all rows with the rank 2ⁱ apart in round i, and add them (SparCML, Renggli et al. 2019).

    The sum is exact. Once sending row indices costs more bytes than sending zeros, all rows travel. Ranks beyond the
    largest power of two first send to a partner, and get the sum from it at the end. If no two ranks pick the same row,
    T = 2·log₂ K·α + (K − 1)·n/B for K a power of two; other K take up to two rounds and (K + 1)·n/B more.
    """

    uneven: ClassVar[bool] = True

    @override
    def run(self, own: Keyed, group: Group, seeds: Sequence[int]) -> Exchanged:
        peers = Peers(group, own.values.device)
        core = 1 << (peers.world_size.bit_length() - 1)
        partner = peers.rank ^ core
        current = _thrifty(merged([own]))
        if peers.rank >= core:
            _swap(peers, partner, current, receive=False)
        elif partner < peers.world_size:
            current = _sum(current, _swap(peers, partner, current, send=False))
        if peers.rank < core:
            for bit in range(core.bit_length() - 1):
                current = _sum(current, _swap(peers, peers.rank ^ (1 << bit), current))
        if peers.rank >= core:
            current = _swap(peers, partner, current, send=False)
        elif partner < peers.world_size:
            _swap(peers, partner, current, receive=False)
        return Exchanged(summed=current, delivered=own, sent_bytes=peers.sent_bytes)

    def hops(self, nbytes: float, world_size: int, whole: float = math.inf) -> Sequence[Hops]:
        """Return two messages per round, because lengths travel in a message of their own."""
        core = 1 << (world_size.bit_length() - 1)
        share = world_size / core
        sizes = [(1 << bit, together(nbytes, share * (1 << bit), whole)) for bit in range(core.bit_length() - 1)]
        if core < world_size:
            sizes += [(core, nbytes), (core, together(nbytes, world_size, whole))]
        return [Hops(stride=stride, count=2, nbytes=size / 2, swap=True) for stride, size in sizes]


def _swap(peers: Peers, peer: int, rows: Keyed, *, send: bool = True, receive: bool = True) -> Keyed:
    """Send rows to `peer`, receive rows from it, or both. Return the rows received, or else `rows`."""
    complete = rows.keys.numel() == rows.most_rows
    message = Dense(values=rows.values) if complete else rows
    inbox = peers.swap({peer: message.to_buffer()} if send else {}, [peer] if receive else [])
    return _read(rows, inbox[peer]) if receive else rows


def _sum(mine: Keyed, theirs: Keyed) -> Keyed:
    return _thrifty(merged([mine, theirs]))


def _thrifty(rows: Keyed) -> Keyed:
    """Return all rows, zeros included, if that takes fewer bytes than naming some."""
    if complete_bytes(rows) >= rows.nbytes:
        return rows
    every = rows.every_key()
    return rows.rekeyed(every, spread(rows, every))


def _read(like: Keyed, message: Tensor) -> Keyed:
    if message[1] != wire.DENSE:
        return like.received(message)
    values = Dense.from_buffer(message).values
    return like.rekeyed(like.every_key(), values.view(-1, like.rows.shape[1]))
