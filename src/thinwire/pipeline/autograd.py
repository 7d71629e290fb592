"""Packing and unpacking as autograd functions. Each side undoes in backward what the other did in forward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire import trace
from thinwire.payloads import Dense, Sparse, Words
from thinwire.trace import Listener

Choose = Callable[[Tensor], tuple[Sparse | Dense, Tensor | None]]
"""A flat activation → its payload, and which elements get a gradient: a `Choice.kept`."""


def pack(x: Tensor, layout: Words, choose: Choose, listeners: Sequence[Listener] = ()) -> tuple[Tensor, Tensor]:
    """Return the chosen elements of `x` as words, and an empty frame (*x.shape, 0) that carries shape and dtype."""
    words, frame = _Pack.apply(x, layout, choose, listeners)
    return words, frame


def unpack(words: Tensor, frame: Tensor, layout: Words, listeners: Sequence[Listener] = ()) -> Tensor:
    """Undo `pack`: return the chosen elements in their places, and zero elsewhere."""
    flat: Tensor = _Unpack.apply(words, frame, layout, listeners)
    return flat.view(frame.shape[:-1])


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layout: Words, choose: Choose, listeners: Sequence[Listener]
    ) -> tuple[Tensor, Tensor]:
        with trace.span("encode", *listeners):
            payload, kept = choose(x.contiguous().view(-1))
            words = layout.write(payload)
        ctx.layout, ctx.shape, ctx.listeners = layout, x.shape, listeners
        ctx.save_for_backward(kept)
        return words, x.new_empty((*x.shape, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, words: Tensor, frame: Tensor) -> tuple[Tensor, None, None, None]:
        (kept,) = ctx.saved_tensors
        with trace.span("decode", *ctx.listeners):
            values, numel = ctx.layout.read_gradient(words), ctx.layout.numel
            if kept is None:
                gradient = values.clone()
            else:  # values for padding fall off the end
                places = kept.masked_fill(kept < 0, numel).long()
                gradient = values.new_zeros(numel + 1).index_copy_(0, places, values)[:numel]
        return gradient.view(ctx.shape), None, None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, frame: Tensor, layout: Words, listeners: Sequence[Listener]) -> Tensor:
        with trace.span("decode", *listeners):
            payload = layout.read(words)
            x = payload.dense()
        ctx.layout, ctx.frame, ctx.listeners = layout, frame.shape, listeners
        ctx.save_for_backward(payload.indices if isinstance(payload, Sparse) else None)
        return x  # flat: a view made in here could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        with trace.span("encode", *ctx.listeners):
            flat = gradient.contiguous()
            words = ctx.layout.write_gradient(flat if indices is None else flat.index_select(0, indices))
        # Older pipelines want a gradient for everything they sent. So the frame gets one, and it is empty too.
        return words, gradient.new_empty(ctx.frame), None, None
