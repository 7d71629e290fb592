"""The numbers of a payload on the wire: plain values, or the scales and packed codes of a format."""

from collections.abc import Sequence
from typing import Annotated, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import Such
from thinwire.errors import PayloadError
from thinwire.formats import Coded, Format
from thinwire.kernels import Arrived, Checks, Groups, Packed, Section
from thinwire.kernels.memory import empty
from thinwire.kernels.parts import Fit, Parts, cut_of_runs
from thinwire.payloads import wire
from thinwire.waits import Verdict, noted_in, on_host, refuse_if

Float = Annotated[torch.dtype, Such(", ".join(map(str, wire.DTYPE_CODES)), wire.DTYPE_CODES.__contains__)]
Narrow = None | Float | Format
"""How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits."""


def narrowed(
    x: Tensor, how: Narrow, dtype: torch.dtype, seed: int, share: float | None = None
) -> tuple[Tensor, Coded | None]:
    """Return the values as the receiver will see them, and their codes if codes travel.

    Args:
        x: The values.
        how: What they are narrowed to.
        dtype: The gradient's, which None stands for.
        seed: For stochastic rounding.
        share: Values in a narrower dtype are clamped to that share of its range (see `fitted`). Without it they may
            overflow, and the overflow shows.
    """
    return narrowed_each(x, [x.numel()], how, dtype, [seed], share)


def narrowed_each(
    x: Tensor, runs: Sequence[int], how: Narrow, dtype: torch.dtype, seeds: Sequence[int], share: float | None = None
) -> tuple[Tensor, Coded | None]:
    """Return what `narrowed` does of each of several runs of values, one after another. A format scales each alone."""
    if isinstance(how, Format):
        return coded_each(Parts(x, cut_of_runs(tuple(runs))), how, dtype, seeds)
    return x.to(how or dtype) if share is None else fitted(x, how or dtype, share), None


def coded_each(
    xs: Parts, how: Format, dtype: torch.dtype, seeds: Sequence[int], factor: float = 1.0
) -> tuple[Tensor, Coded]:
    """Return vectors times a factor as the receiver will see them, one after another, and their codes."""
    values = empty(sum(xs.cut.lengths), torch.promote_types(dtype, torch.float32), xs.flat.device)
    return values, Coded.of_each(xs, how, seeds=seeds, out=values, factor=factor)


def fit_of(how: Narrow, wide: torch.dtype | None, dtype: torch.dtype, share: float | None) -> Fit | None:
    """Return how a kernel writes wide values as `narrowed` does; None if it cannot, they stay, or codes travel.

    float64 becomes 16 bits by way of float32 in torch, and not in a GPU's instructions.
    """
    if wide != torch.float32 or isinstance(how, Format) or (how or dtype) == wide:
        return None
    return Fit(how or dtype, None if share is None else _bound(wide, how or dtype, share))


def fitted(x: Tensor, dtype: torch.dtype, share: float = 1.0) -> Tensor:
    """Return `x` in `dtype`, with finite values clamped to ±b, a `share` 1/K of its range: b = max / (K·(1 + u)ᴷ).

    No sum of K such values overflows, in any order, although each addition may round up by a fraction u = eps/2.
    Nothing is clamped if `dtype` covers more than half of x's range. NaN and infinities stay.
    """
    bound = _bound(x.dtype, dtype, share)
    return x.to(dtype) if bound is None else kernels.joined([x.reshape(-1)], dtype, 1.0, bound).view_as(x)


def joined_as(xs: Sequence[Tensor], dtype: torch.dtype, share: float | None = None, factor: float = 1.0) -> Tensor:
    """Return flat tensors times a factor as one in `dtype`, which is `fitted` if there is a share."""
    return kernels.joined(xs, dtype, factor, None if share is None else _bound(xs[0].dtype, dtype, share))


def _bound(wide: torch.dtype, dtype: torch.dtype, share: float) -> float | None:
    range_ = torch.finfo(dtype)
    fits = range_.max > torch.finfo(wide).max / 2
    return None if fits else range_.max * share / (1 + range_.eps / 2) ** (1 / share)


def joined(parts: list[Coded | None]) -> Coded | None:
    """Return the codes of several payloads as one, or None if there are none."""
    coded = [part for part in parts if part is not None]
    return Coded.cat(coded) if coded else None


def sections(values: Tensor, coded: Coded | None) -> tuple[Tensor | Section, ...]:
    """Return the sections that travel: the values, or the scales and the packed codes."""
    return (values,) if coded is None else (coded.scales, Section(coded.codes, coded.format.bits))


def lengths(values: Tensor, coded: Coded | None) -> tuple[int, ...]:
    """Return the length of each section in bytes, without padding."""
    if coded is None:
        return (values.nbytes,)
    return (coded.scales.nbytes, -(-coded.codes.numel() * coded.format.bits // 8))


def nbytes(values: Tensor, coded: Coded | None) -> int:
    """Return the length of all sections in bytes, padding included."""
    return sum(map(wire.padded, lengths(values, coded)))


def header(kind: int, values: Tensor, coded: Coded | None, count: int, numel: int, coding: int = wire.NUMBERS) -> bytes:
    """Return the header for these numbers; the payload's kind decides what `count` counts."""
    dtype, bits = (values.dtype, 0) if coded is None else (None, coded.format.bits)
    return wire.Header(kind, dtype, count, numel, bits, coding).pack()


@final
class Rows:
    """The ranks' buffers, laid out like this rank's: a header, its numbers, and sections (bytes) that name them.

    Header and padding are checked: where the host must not wait, in the pass that reads the numbers, so last.
    """

    def __init__(self, buffers: Tensor, head: bytes, values: Tensor, coded: Coded | None, *named: int) -> None:
        self._buffers, self._values, self._coded, self._start = buffers, values, coded, len(head)
        used = 0 if coded is None else values.numel() * coded.format.bits % 8
        self._fixed, self._error = wire.unread(buffers, head, *lengths(values, coded), *named, bits=used)
        self._verdict = None if on_host(buffers) else noted_in()
        if self._verdict is None:
            refuse_if(kernels.differ(buffers, self._fixed), self._error)

    @property
    def named(self) -> Tensor:
        """The sections behind the numbers."""
        return self._buffers[:, self._start + nbytes(self._values, self._coded) :]

    def arrived(self) -> tuple[Tensor, Checks | None, Tensor | None]:
        """Return what `read` does; where the host must not wait, plain numbers as they lie in the buffers.

        Then come what `kernels.scatter` is to check of them, and room for the flags.
        """
        values, verdict, start = self._values, self._verdict, self._start
        aligned = (self._buffers.storage_offset() + start) % 8 == 0 and self._buffers.stride(0) % 8 == 0
        if verdict is None or self._coded is not None or not values.numel() or not aligned:
            return self.read(), None, None
        checks = Checks(self._buffers, self._fixed, verdict.checks)
        flags = self._withheld(verdict)
        return self._buffers[:, start : start + values.nbytes].view(values.dtype), checks, flags

    def lying(self) -> tuple[Arrived, Tensor] | None:
        """Return where the numbers lie, and room for flags: what whoever reads them finds. None if the host may wait.

        Until then, and if one is set, they count as 0.
        """
        return None if self._verdict is None else (self._arrived(), self._withheld(self._verdict))

    def read(self, *, summed: bool = False) -> Tensor:
        """Return every rank's numbers, (ranks, count), or if `summed` the sum over the ranks, (count).

        Where the host must not wait for what was checked, they are 0 if anything was wrong.
        """
        values = self._values
        if self._coded is None and on_host(self._buffers):
            rows = plain(self._buffers[:, self._start :], values.numel(), values.dtype)
            return kernels.row_sums(rows) if summed else rows
        rows, flags = kernels.numbers_read(*self._arrived(), summed)
        if self._verdict is not None:
            self._verdict.withhold(flags, self._error)
        return rows

    def _arrived(self) -> Arrived:
        values, coded, buffers = self._values, self._coded, self._buffers
        own = 0 if coded is None else coded.scales.nbytes
        start, bits = self._start + wire.padded(own), 0 if coded is None else coded.format.bits
        groups = Groups((values.numel(),)) if coded is None else coded.format.groups(coded.runs)
        table = values.new_empty(0) if coded is None else coded.format.on(values.device)
        wrong, fixed = ([], self._fixed[:, :0]) if self._verdict is None else (self._verdict.checks, self._fixed)
        return Arrived(buffers, Packed(self._start, start, bits), table, groups, values.dtype, wrong, fixed)

    def _withheld(self, verdict: Verdict) -> Tensor:
        """Return room for the flags of all checks, which decide from now on."""
        flags = self._values.new_empty(1 + sum(map(len, verdict.checks)), dtype=torch.bool)
        verdict.withhold(flags, self._error)
        return flags


def plain(buffers: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return every rank's `count` numbers, (ranks, count), from the section at the start of each buffer."""
    # Cloned, because the numbers of a single rank would otherwise be a view of its buffer.
    cloned = buffers[:, : count * dtype.itemsize].clone(memory_format=torch.contiguous_format)
    return cloned.view(-1).view(dtype).view(len(buffers), count)


def check_plain(head: wire.Header) -> torch.dtype:
    """Return the dtype of the values. Raises PayloadError if they are codes: a buffer does not name their format."""
    if head.dtype is None:
        raise PayloadError("the values are codes of a format, which only a payload of the same recipe can read")
    return head.dtype
