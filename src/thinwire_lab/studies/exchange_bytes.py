"""How many bytes does a rank send in an exchange? The formulas, for ranks that pick independently.

They predict the mean over ranks, without the transport's overhead. Messages of rows have an 8-byte length before them.
"""

from functools import singledispatch

from thinwire import exchanges
from thinwire.exchanges import Exchange
from thinwire.exchanges.merging import complete_bytes, mergeable, table
from thinwire.payloads import Keyed, Payload, Sparse
from thinwire.payloads.indices import Layout
from thinwire.trace import ring_bytes


@singledispatch
def sent_bytes(exchange: Exchange, payload: Payload, world_size: int) -> float:
    """Return the bytes that a rank sends, whose payload is like this one."""
    raise TypeError(f"there is no formula for {exchange!r}; expected an exchange of thinwire's: register one here")


@sent_bytes.register
def _(exchange: exchanges.AllReduce, payload: Payload, world_size: int) -> float:
    return ring_bytes(payload.values.nbytes, world_size)


@sent_bytes.register
def _(exchange: exchanges.AllGather, payload: Payload, world_size: int) -> float:
    return (world_size - 1) * payload.nbytes


@sent_bytes.register
def _(exchange: exchanges.RecursiveDoubling, payload: Payload, world_size: int) -> float:
    # Each round sends what 1, 2, 4, … ranks picked together; ranks beyond a power of two send first, and get the sum.
    own, core = table(mergeable(payload, "RecursiveDoubling")), 1 << (world_size.bit_length() - 1)
    together = [world_size / core * (1 << bit) for bit in range(core.bit_length() - 1)]
    inside = core * sum(8 + _shorter(own, ranks) for ranks in together)
    return (inside + (world_size - core) * (16 + _shorter(own, 1) + _shorter(own, world_size))) / world_size


@sent_bytes.register
def _(exchange: exchanges.OwnerSharded, payload: Payload, world_size: int) -> float:
    # All but 1/K of its rows, then 1/K of all rows to each rank.
    own = table(mergeable(payload, "OwnerSharded"))
    shard, total = (_named(own, _union(own, ranks) / world_size) for ranks in (1, world_size))
    return (world_size - 1) * (16 + shard + total)


@sent_bytes.register
def _(exchange: exchanges.GlobalTopKTree, payload: Payload, world_size: int) -> float:
    # K − 1 messages go up the tree in all, and as many down.
    exact = 2 * payload.values.nbytes if exchange.exact_values else 0
    return (world_size - 1) / world_size * (2 * table(mergeable(payload, "GlobalTopKTree")).nbytes + exact)


@sent_bytes.register
def _(exchange: exchanges.UnionAllReduce, payload: Payload, world_size: int) -> float:
    # The bitmap, and the rows as `packed` makes them.
    own = table(mergeable(payload, "UnionAllReduce"))
    rows = _union(own, world_size) * own.rows.shape[1] * own.rows.element_size()
    return ring_bytes(-(-own.key_space // 8), world_size) + exchange.share() * 2 * (world_size - 1) / world_size * rows


def _union(own: Keyed, ranks: float) -> float:
    """Return how many rows the independent picks of so many ranks cover: s(1 − (1 − k/s)ᴾ)."""
    picked, space = own.keys.numel(), own.most_rows
    return space * (1 - (1 - picked / space) ** ranks) if space else 0.0


def _named(like: Keyed, count: float) -> float:
    """Return the length of a message of so many rows."""
    empty = like.rekeyed(like.keys[:0], like.rows[:0]).nbytes
    return empty + count * like.rows.shape[1] * like.rows.element_size() + _names(like, round(count))


def _names(like: Keyed, count: int) -> int:
    """Return the bytes that name so many rows."""
    if isinstance(like, Sparse):
        return Layout.of(like.regions, (count,), like.numel, ascending=True).nbytes
    return Layout.of_rows(count, like.key_space).nbytes


def _shorter(own: Keyed, ranks: float) -> float:
    """Return the length of a message of all that so many ranks picked, or of all rows if that is shorter."""
    return min(_named(own, _union(own, ranks)), complete_bytes(own))
