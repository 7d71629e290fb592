"""What exchanges that sum picks on the way have in common."""

from thinwire.payloads import Keyed, Payload, Sparse, wire
from thinwire.payloads.keyed import union


def table(payload: Payload, exchange: str) -> Keyed:
    """Return the payload if its rows can be merged with other ranks'. Raises TypeError otherwise."""
    if not isinstance(payload, Keyed):
        raise TypeError(f"{exchange} merges sparse and block-sparse payloads; got {type(payload).__name__}")
    if payload.coded is not None:
        raise TypeError(
            f"{exchange} adds values on the way, and codes cannot be added; use AllGather, or a dtype as values="
        )
    # Its own message is then as long as others of as many rows, which come in this order.
    return payload.rekeyed(payload.keys, payload.rows) if isinstance(payload, Sparse) else payload


def merged(tables: list[Keyed]) -> Keyed:
    """Return the sum of tables, every key once."""
    return tables[0].rekeyed(*union(tables))


def expected_union(keys: float, space: int, ranks: float) -> float:
    """Return how many keys `ranks` independent picks of `keys` out of `space` cover: s(1 − (1 − k/s)ᴾ)."""
    return space * (1 - (1 - keys / space) ** ranks) if space else 0.0


def message_bytes(like: Keyed, count: float) -> float:
    """Predict the length of a message of `count` rows of `like`."""
    empty = like.rekeyed(like.keys[:0], like.rows[:0]).nbytes
    row = like.rows.shape[1] * like.rows.element_size()
    return empty + count * row + like.named_nbytes(round(count))


def complete_bytes(like: Keyed) -> int:
    """Return the length of a message of all rows of `like`."""
    return wire.HEADER_BYTES + wire.padded(like.most_rows * like.rows.shape[1] * like.rows.element_size())
