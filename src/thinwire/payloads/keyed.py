"""Some rows of a table, by number: what sparse and block-sparse payloads have in common."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.formats import Coded
from thinwire.payloads.base import Payload


class Keyed(Payload):
    """Row `keys[i]` (int32) of `key_space` rows holds `rows[i]`, and the others are zero.

    Exchanges may replace the keys, by `rekeyed`.
    """

    keys: Tensor
    coded: Coded | None

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """The values, of shape (keys, row width)."""

    @property
    @abstractmethod
    def key_space(self) -> int:
        """How many rows the table has; keys lie in [0, key_space)."""

    @property
    def most_rows(self) -> int:
        """How many keys the regions allow."""
        return self.key_space

    def every_key(self) -> Tensor:
        """Return all keys (int32) that the regions allow, in the order that `rekeyed` gives them."""
        return torch.arange(self.key_space, dtype=torch.int32, device=self.keys.device)

    @abstractmethod
    def region_counts(self) -> list[int]:
        """Return how many rows each region has, which are stored region by region."""

    @abstractmethod
    def rekeyed(self, keys: Tensor, rows: Tensor) -> Self:
        """Return the same table with these rows instead, perhaps in another order; no key may occur twice."""

    @abstractmethod
    def filled(self, count: int) -> Self:
        """Return this payload, padded to `count` rows."""

    @override
    def counts(self) -> list[int]:
        width = self.rows.shape[1]
        return [count * width for count in self.region_counts()]

    @classmethod
    @abstractmethod
    def from_buffer(cls, buffer: Tensor) -> Self:
        """Return what `to_buffer` wrote.

        Raises:
            PayloadError: If it is malformed.
        """

    def received(self, buffer: Tensor) -> Self:
        """Return another rank's rows of the same table from its buffer.

        Raises:
            PayloadError: If the table differs.
        """
        other = type(self).from_buffer(buffer)
        mine, theirs = ((p.key_space, p.rows.shape[1], p.rows.dtype) for p in (self, other))
        if mine != theirs:
            raise PayloadError(f"received rows of (key space, width, dtype) {theirs}; expected {mine}")
        return self.rekeyed(*kernels.merge([other.keys], [other.rows]))


def merged(tables: Sequence[Keyed]) -> Keyed:
    """Return the sum of tables of one kind, added in the order given: every key once, ascending."""
    return tables[0].rekeyed(*kernels.merge([table.keys for table in tables], [table.rows for table in tables]))


def where(table: Keyed, here: Tensor) -> Keyed:
    """Return the rows of `table` where bools are set."""
    return table.rekeyed(table.keys[here], table.rows[here])


def spread(table: Keyed, keys: Tensor) -> Tensor:
    """Return the rows of `table` at `keys`, zeros where it has none. `keys` must include all of its own."""
    rows = table.rows.new_zeros(keys.numel(), table.rows.shape[1])
    ascending, order = keys.sort()
    return rows.index_add_(0, order[torch.searchsorted(ascending, table.keys)], table.rows)
