"""A GPU's streams: one for encoding, one for decoding, whatever the model, its buckets and their exchanges."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def stream_of(device: torch.device, purpose: str) -> Any:
    """Return the stream of a GPU for a purpose. Its kernels go before those of backward, which nobody waits for."""
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def within(stream: Any) -> Iterator[None]:
    """Have work go to a stream, as `torch.cuda.stream` does. That looks for devices first, for some 20 µs."""
    if torch.cuda.current_device() != stream.device_index:
        with torch.cuda.stream(stream):
            yield
        return
    before = torch.cuda.current_stream(stream.device_index)
    if before == stream:
        yield
        return
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def follow(stream: Any, other: Any) -> None:
    """Have a stream wait for all that another one has by now."""
    if stream != other:
        stream.wait_stream(other)
