"""What goes over a channel: a server's parameters, into a trainer's copy, and gradients, by a recipe."""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from thinwire import trace
from thinwire.errors import PayloadError
from thinwire.interrupts import untorn
from thinwire.payloads import Blocks, Payload
from thinwire.reducer import Bucket, Reducer
from thinwire.reducer.wrappers import release
from thinwire.waits import all_finite
from thinwire.wire.layout import Layout, Part, Places
from thinwire.wire.parameters import Entry
from thinwire.wire.sections import table, write_rows

logger = logging.getLogger("thinwire")
_NEVER = -1


class Base(NamedTuple):
    """What gradients are computed on: the server's version, as it was known when the trainer had joined so often."""

    version: int
    joins: int


@final
class Copy:
    """A trainer's copy of one server's parameters, overwritten only by `catch_up`: not from forward to backward.

    Of the rows that it fetches it knows the version of each (8 bytes a row), and counts them.
    """

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        self._layout, self.places, self.count = layout, Places(layout, model), 0
        self._versions = [
            torch.full(each.shape[:1], _NEVER, dtype=torch.int64, device="cpu") for each in layout.fetched
        ]
        self._lock, self.base = threading.Lock(), Base(0, 0)
        self._payloads, self._rows = list[tuple[Part, Payload]](), list[tuple[Entry, Blocks]]()
        """What has come and is not written yet, and what that is computed on."""
        self._next = self.base
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
        payloads, rows = self._layout.read(body, parts, self._layout.pushed, number or 1)
        with self._lock:
            if parts is self._layout.dense:  # which is more than all before
                self._payloads.clear()
            if number is None:
                self._rows.clear()
            self._payloads += zip(parts, payloads, strict=True)
            self._rows += zip(self._layout.pushed, rows, strict=True)
            self._next = base

    @torch.no_grad()
    def catch_up(self) -> None:
        """Write what has come."""
        with self._lock, untorn():  # a difference is added once
            for part, payload in self._payloads:
                part.write(payload, self.places.flats[part.dtype], whole=part in self._layout.dense)
            for entry, rows in self._rows:
                write_rows(self.places.parameters[entry.name], entry, rows)
            self._payloads.clear()
            self._rows.clear()
            self.base = self._next

    @torch.no_grad()
    def fetched(self, keys: Sequence[Tensor], body: memoryview, version: int) -> None:
        """Write the rows with these ids. Raises FrameError or PayloadError, and then nothing has been written."""
        _, found = self._layout.read(body, (), self._layout.fetched)
        for entry, asked, rows in zip(self._layout.fetched, keys, found, strict=True):
            if not torch.equal(rows.keys.long(), asked.long()):
                raise PayloadError(f"{rows.keys.numel()} rows of {entry.name}; expected the {asked.numel()} asked for")
        for i, (entry, rows) in enumerate(zip(self._layout.fetched, found, strict=True)):
            write_rows(self.places.parameters[entry.name], entry, rows)
            self._versions[i][keys[i]] = version
            self.count += keys[i].numel()

    def rejoined(self, version: int) -> None:
        """Note that a server has gone back to this version: nothing that is here is newer."""
        for each in self._versions:
            each.clamp_(max=version)

    def oldest(self, version: int, gradients: Mapping[str, Tensor]) -> int:
        """Return the version of the oldest values under these gradients; ValueError for rows never fetched."""
        found = [version] if self._layout.sizes else []
        for entry, versions in zip(self._layout.fetched, self._versions, strict=True):
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


def wanted(parameters: Sequence[Entry], given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the ids given, as ascending int64 on the CPU, or all; TypeError or ValueError for those that cannot be."""
    known = {each.name: each for each in parameters}
    if not known:
        raise ValueError("fetch needs fetch_rows=True, in both serve and connect")
    if given is None:
        return {name: torch.arange(each.shape[0], device="cpu") for name, each in known.items()}
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
class Uplink:
    """A recipe's memory and codec between gradients and updates' bodies; not thread-safe; `who` seeds its own draws."""

    def __init__(self, layout: Layout, who: str, device: torch.device | None = None) -> None:
        self._layout, self._who, self.scratch, self.finite = layout, who, 0, True
        self._flats, self._views = layout.flats(device)
        self.staged = sum(flat.nbytes for flat in self._flats.values())

    def encode(self, number: int, gradients: Mapping[str, Tensor], *, drain: bool) -> list[Tensor]:
        """Return the sections of update `number`; what they do not deliver is staged, for the caller to commit.

        If they `drain`, all of the residual goes out. Gradients are read, not kept; zeros for those missing.
        `finite` says whether all sections are: if not, a server would drop them.
        """
        with trace.span("encode"):
            for name, view in self._views.items():
                view.zero_() if (gradient := gradients.get(name)) is None else view.copy_(gradient)
            parts, sections, self.finite = self._layout.up(number), list[Tensor](), True
            if drain:
                parts, memories = self._layout.dense, self._layout.recipe.memories()
                for dtype, segment in self._layout.segments:
                    release(memories, Bucket(flat=self._flats[dtype], segments=[segment]), 1.0)
            for part in parts:
                bucket = part.bucket(self._flats[part.dtype])
                payload = part.encode(bucket, number, self._who)
                self.finite &= all_finite(x for x in payload.tensors() if x.is_floating_point())
                self.scratch = max(self.scratch, part.way.most(bucket, payload, number - 1))
                sections.append(payload.packed.cpu())
            return [*sections, *(_rows(entry, gradients.get(entry.name)) for entry in self._layout.rows)]

    def check(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise TypeError for gradients that are sparse where the layout's are not, or the other way round."""
        for entry in self._layout.parameters:
            gradient = gradients.get(entry.name)
            if gradient is not None and gradient.is_sparse != entry.rows:
                raise TypeError(
                    f"{entry.name} got a {'sparse' if gradient.is_sparse else 'dense'} gradient; expected a "
                    f"{'sparse' if entry.rows else 'dense'} one: rows are sent for nn.Embedding(sparse=True) whose "
                    "weight is used nowhere else"
                )


def drainable(recipe: Reducer) -> bool:
    """Whether all that waits in this recipe's memories can go out at once."""
    return all(any(part.releases for part in memory.parts) for memory in recipe.memories() if memory.stateful)


def _rows(entry: Entry, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        none = torch.empty(0, dtype=entry.dtype, device="cpu")
        return table(entry, none, none)
    gradient = gradient.coalesce()
    return table(entry, gradient.indices()[0], gradient.values())
