"""A trainer's copy of one server's parameters, into which answers are written, and of rows that it fetches."""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from thinwire.errors import PayloadError
from thinwire.payloads import Blocks, Payload
from thinwire.wire.entries import Entry, write_rows
from thinwire.wire.layout import Layout, Part, Places

logger = logging.getLogger("thinwire")
_NEVER = -1


class Base(NamedTuple):
    """What gradients are computed on: the server's version, as it was known when the trainer had joined so often."""

    version: int
    joins: int


_Answer = tuple[Sequence[Part], Sequence[Payload], Sequence[Blocks], Base]


@final
class Copy:
    """A trainer's copy of one server's parameters, overwritten only by `catch_up`: not from forward to backward."""

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        self._layout, self.places = layout, Places(layout, model)
        self._lock, self._kept = threading.Lock(), list[_Answer]()
        self.base = Base(0, 0)
        self._changes: list[int] | None = self._counted()

    def check(self, module: nn.Module) -> None:
        """Raise StateError if parameters of this model or replica have moved. Warn once if others write them."""
        self.places.check(module)
        if self._changes is not None and self._changes != self._counted():
            self._changes = None
            logger.warning(
                "something other than thinwire, such as an optimizer or load_state_dict, has changed parameters that a "
                "server keeps. The server's next answer overwrites the change or, with down=, leaves a difference. "
                "Swapping an average in for evaluation and out again is harmless"
            )

    def _counted(self) -> list[int]:
        """Return how often somebody else has changed each parameter in place: answers do not count."""
        return [p._version for p in self.places.parameters.values()]

    def take(self, body: memoryview, base: Base, number: int | None = None) -> None:
        """Keep an answer to update `number`, or everything, until `catch_up`. Raises FrameError or PayloadError."""
        parts = self._layout.dense if number is None else self._layout.down
        found = self._layout.read(body, parts, self._layout.pushed, number or 1)
        with self._lock:
            if number is None:  # which is more than all before
                self._kept.clear()
            self._kept.append((parts, *found, base))

    @torch.no_grad()
    def catch_up(self) -> None:
        """Write what has come."""
        with self._lock:
            for parts, payloads, rows, base in self._kept:
                for part, payload in zip(parts, payloads, strict=True):
                    part.write(payload, self.places.flats[part.dtype], whole=parts is self._layout.dense)
                for entry, some in zip(self._layout.pushed, rows, strict=True):
                    write_rows(self.places.parameters[entry.name], entry, some)
                self.base = base
            self._kept.clear()


def wanted(parameters: Sequence[Entry], given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the ids given, as ascending int64 on the CPU, or all; TypeError or ValueError for those that cannot be."""
    known = {each.name: each for each in parameters}
    if not known:
        raise ValueError("fetch needs fetch_rows=True, in both serve and connect")
    if given is None:
        return {name: torch.arange(each.shape[0]) for name, each in known.items()}
    if strange := given.keys() - known.keys():
        raise ValueError(f"{min(strange)!r} has no rows to fetch; expected some of {', '.join(map(repr, known))}")
    return {name: _ids(known[name], ids) for name, ids in given.items()}


def _ids(entry: Entry, ids: Tensor) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids of {entry.name} are {ids.dtype}; expected int64 or int32: call .long() on them")
    found = ids.detach().reshape(-1).cpu().long().unique()
    if found.numel() and not 0 <= int(found[0]) <= int(found[-1]) < entry.shape[0]:
        raise ValueError(
            f"ids of {entry.name} range from {int(found[0])} to {int(found[-1])}; expected 0 to {entry.shape[0] - 1}: "
            "pass the ids that its embedding looks up, offsets included"
        )
    return found


@final
class Rows:
    """A trainer's copy of the rows that it fetches from one server, and the version of each: 8 bytes a row."""

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        self.layout, self.count = layout, 0
        self._parameters = [model.get_parameter(each.name) for each in layout.fetched]
        self._versions = [torch.full(each.shape[:1], _NEVER, dtype=torch.int64) for each in layout.fetched]

    def among(self, ids: Mapping[str, Tensor]) -> list[Tensor]:
        """Return those of `ids` that this server has, in its order; nothing if there are none."""
        none = torch.empty(0, dtype=torch.int64)
        found = [ids.get(each.name, none) for each in self.layout.fetched]
        return found if any(each.numel() for each in found) else []

    @torch.no_grad()
    def take(self, keys: Sequence[Tensor], body: memoryview, version: int) -> None:
        """Write an answer. Raises FrameError or PayloadError, and then nothing has been written."""
        _, found = self.layout.read(body, (), self.layout.fetched)
        for entry, asked, rows in zip(self.layout.fetched, keys, found, strict=True):
            if not torch.equal(rows.keys.long(), asked.long()):
                raise PayloadError(f"{rows.keys.numel()} rows of {entry.name}; expected the {asked.numel()} asked for")
        for i, (entry, rows) in enumerate(zip(self.layout.fetched, found, strict=True)):
            write_rows(self._parameters[i], entry, rows)
            self._versions[i][keys[i]] = version
            self.count += keys[i].numel()

    def rejoined(self, version: int) -> None:
        """Note that a server has gone back to this version: nothing that is here is newer."""
        for each in self._versions:
            each.clamp_(max=version)

    def oldest(self, version: int, gradients: Mapping[str, Tensor]) -> int:
        """Return the version of the oldest values under these gradients; ValueError for rows never fetched."""
        found = [version] if self.layout.sizes else []
        for entry, versions in zip(self.layout.fetched, self._versions, strict=True):
            if (gradient := gradients.get(entry.name)) is not None and (keys := gradient._indices()[0].cpu()).numel():
                found.append(int(versions[keys].min()))
                if found[-1] == _NEVER:
                    never = keys[versions[keys] == _NEVER].unique()
                    raise ValueError(
                        f"{entry.name} has gradients for {never.numel()} rows that were never fetched, such as row "
                        f"{int(never[0])}: call trainer.fetch({{{entry.name!r}: ids}}) with the batch's ids before the "
                        "forward pass"
                    )
        return min(found, default=version)
