"""Where indices lie with regard to spans."""

import torch
from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.payloads.base import Spans


def in_order(spans: Spans) -> bool:
    """Whether spans follow one another, so that what ascends in each ascends as a whole."""
    ends = (offset + length for offset, length in spans)
    return all(end <= offset for end, (offset, _) in zip(ends, spans[1:], strict=False))


def by_span(indices: Tensor, spans: Spans) -> tuple[Tensor, tuple[int, ...]]:
    """Return the order that groups indices by span, ascending in each, and how many fall in each."""
    in_order = bool((indices[1:] >= indices[:-1]).all())
    ascending, order = (indices, torch.arange(indices.numel(), device=indices.device)) if in_order else indices.sort()
    edges = torch.tensor([(offset, offset + length) for offset, length in spans], device=indices.device)
    bounds = torch.searchsorted(ascending, edges.to(indices.dtype)).tolist()
    return torch.cat([order[low:high] for low, high in bounds]), tuple(high - low for low, high in bounds)


def last_filled(spans: Spans) -> int:
    """Return which span is the last that has an element; the very last if none has."""
    return max((i for i, (_, length) in enumerate(spans) if length), default=len(spans) - 1)


def check_inside(indices: Tensor, spans: Spans, numel: int, *, ascending: bool) -> None:
    """Raise PayloadError unless indices (ranks, count) in [0, numel), ascending by row or not, lie in the spans."""
    if spans == ((0, numel),) or not indices.numel():
        return
    edges = torch.tensor([e for at, n in sorted(spans) for e in (at, at + n)], dtype=torch.int32, device=indices.device)
    if ascending:
        below = torch.searchsorted(indices, edges.expand(indices.shape[0], -1).contiguous()).view(-1, len(spans), 2)
        inside = int((below[..., 1] - below[..., 0]).sum())
    else:
        inside = int((torch.searchsorted(edges, indices, right=True) % 2).sum())
    if inside != indices.numel():
        raise PayloadError(f"{indices.numel() - inside} of {indices.numel()} indices lie outside the payload's spans")


def block_elements(keys: Tensor, edges: tuple[int, ...], spans: Spans, width: int) -> tuple[Tensor, Tensor]:
    """Return the indices (int32) of the elements of blocks, and whether each is one, or fills up a last block.

    Of the blocks of span i, numbers go from edges[i] on. What fills up lies at the span's last element: padding, where
    its value is 0.
    """
    starts, regions = (torch.tensor(x, device=keys.device, dtype=torch.int32) for x in (edges, spans))
    part = torch.searchsorted(starts, keys, right=True) - 1
    first = (keys - starts[part]) * width
    within = first[:, None] + torch.arange(width, device=keys.device, dtype=torch.int32)
    last = regions[part, 1, None] - 1
    return (within.minimum(last) + regions[part, 0, None]).view(-1), (within <= last).view(-1)
