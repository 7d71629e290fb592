"""The rows of sparse embeddings that a trainer has, and those that it has asked for."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from thinwire.wire.frames import FrameError
from thinwire.wire.layout import Entry, Layout, write_rows
from thinwire.wire.rows import read_answer

_NEVER = -1


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
        found = read_answer(self.layout, keys, body)
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


@final
class Fetches:
    """What was asked of one server and has not come. The caller holds the channel's lock."""

    def __init__(self) -> None:
        self._latest, self._open, self._asked = 0, dict[int, tuple[int, Sequence[Tensor]]](), 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def add(self, keys: Sequence[Tensor], *, after: int) -> int:
        """Note a question, to be asked after this update, and return its number."""
        self._latest += 1
        self._open[self._latest] = (after, keys)
        return self._latest

    def due(self, transmitted: int) -> int | None:
        """Return the next question to be asked when so many updates have been sent, and take it for asked."""
        for number, (after, _) in self._open.items():
            if number > self._asked and after <= transmitted:
                self._asked = number
                return number
        return None

    def repeat(self) -> None:
        """Have all be asked again."""
        self._asked = 0

    def keys(self, number: int) -> Sequence[Tensor]:
        """Return what was asked. Raises FrameError if that question is not open. Needs no lock."""
        if (found := self._open.get(number)) is None:
            raise FrameError(f"rows for request {number}, which is not open")
        return found[1]

    def done(self, number: int) -> None:
        """Note that the answer has come."""
        del self._open[number]
