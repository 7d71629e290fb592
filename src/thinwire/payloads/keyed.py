"""Some rows of a table, by number: what sparse and block-sparse payloads have in common."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.formats import Coded
from thinwire.payloads.base import Payload


class Keyed(Payload):
    """Row `keys[i]` (int32) of `key_space` rows holds `rows[i]`; the others are zero. Exchanges may change the set."""

    keys: Tensor
    coded: Coded | None

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """The values, of shape (keys, row width)."""

    @property
    @abstractmethod
    def key_space(self) -> int:
        """How far keys reach."""

    @property
    @abstractmethod
    def most_rows(self) -> int:
        """How many keys the regions allow."""

    @abstractmethod
    def every_key(self) -> Tensor:
        """Return all keys (int32) that the regions allow, in the order in which `rekeyed` keeps them."""

    @abstractmethod
    def region_counts(self) -> list[int]:
        """Return how many rows lie in each region; they come region by region."""

    @abstractmethod
    def rekeyed(self, keys: Tensor, rows: Tensor) -> Self:
        """Return the same table with these rows; no key occurs twice. They may come to lie in another order."""

    @abstractmethod
    def filled(self, count: int) -> Self:
        """Return this with padding up to `count` rows."""

    @abstractmethod
    def named_nbytes(self, count: int) -> int:
        """Return how many bytes name `count` rows of this table after `rekeyed`, padding included."""

    @classmethod
    @abstractmethod
    def from_buffer(cls, buffer: Tensor) -> Self:
        """Read what `to_buffer` wrote. Raises PayloadError when malformed."""

    def received(self, buffer: Tensor) -> Self:
        """Read another rank's rows of the same table. Raises PayloadError when they are of another."""
        other = type(self).from_buffer(buffer)
        mine, theirs = ((p.key_space, p.rows.shape[1], p.rows.dtype) for p in (self, other))
        if mine != theirs:
            raise PayloadError(f"received rows of (key space, width, dtype) {theirs}; expected {mine}")
        return self.rekeyed(*union([other]))


def union(tables: Sequence[Keyed]) -> tuple[Tensor, Tensor]:
    """Return the sum of tables of one kind, added in their order: ascending keys and rows."""
    rows = [table.rows for table in tables]
    return kernels.merge([table.keys for table in tables], rows)


def spread(table: Keyed, keys: Tensor) -> Tensor:
    """Return the rows of `table` at `keys`, which include its own: zeros where it has none."""
    rows = table.rows.new_zeros(keys.numel(), table.rows.shape[1])
    ascending, order = keys.sort()
    return rows.index_add_(0, order[torch.searchsorted(ascending, table.keys)], table.rows)
