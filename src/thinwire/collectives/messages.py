"""Messages between ranks as JSON and states: nothing is unpickled, as torch's object collectives do."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.groups import Group, plain_device

_TENSOR = "\0tensor"


def all_gather_plain(mine: object, group: Group) -> list[Any]:
    """Return every rank's value, by rank: what JSON carries, so that tuples come as lists. A collective."""
    text, device = json.dumps(mine).encode(), plain_device(group)
    sizes = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather(list(sizes.split(1)), torch.tensor([len(text)], device=device), group)
    longest = int(sizes.max())
    rows = torch.empty(group.size(), longest, dtype=torch.uint8, device=device)
    dist.all_gather(list(rows), _bytes(text.ljust(longest)).to(device), group)
    return [json.loads(_text(row)) for row in rows]


def broadcast_state(state: object, group: Group, source: int) -> Any:
    """Return rank `source`'s state, tensors in what JSON carries; on other ranks in host memory. A collective."""
    move = partial(dist.broadcast, group=group, group_src=source)
    if group.rank() != source:
        return _take(move, plain_device(group))
    _give(state, move, plain_device(group))
    return state


def packed(state: object) -> bytes:
    """Return a state as bytes."""
    parts: list[bytes] = []
    _give(state, lambda x: parts.append(_text(x.view(torch.uint8))), "cpu")
    return b"".join(parts)


def unpacked(data: bytes) -> Any:
    """Return the state that `packed` has made bytes of, in host memory. Raises ValueError if it is cut short."""
    rest, place = torch.frombuffer(bytearray(data), dtype=torch.uint8), 0

    def move(x: Tensor) -> None:
        nonlocal place
        x.view(torch.uint8).copy_(rest[place : (place := place + x.nbytes)])

    return _take(move, "cpu")


def send_state(state: object, group: Group, to: int) -> None:
    """Send a state to a rank, which calls `receive_state`."""
    _give(state, partial(dist.send, group=group, group_dst=to), plain_device(group))


def receive_state(group: Group, source: int) -> Any:
    """Return the state that a rank sends, in host memory."""
    return _take(partial(dist.recv, group=group, group_src=source), plain_device(group))


def _give(state: object, move: Callable[[Tensor], object], device: str) -> None:
    tensors: list[Tensor] = []

    def apart(x: object) -> dict[str, Sequence[Any]]:
        if not isinstance(x, Tensor):
            raise TypeError(f"a state holds {x!r:.100}; expected tensors, and plain values that JSON can carry")
        tensors.append(x.detach())
        return {_TENSOR: [str(x.dtype).removeprefix("torch."), list(x.shape)]}

    text = b""  # which tells the others of an error here
    try:
        text = json.dumps(state, default=apart).encode()
    finally:
        move(torch.tensor([len(text)], device=device))
    for each in (_bytes(text), *(x.reshape(-1).view(torch.uint8) for x in tensors)):
        if each.numel():
            move(each.to(device))


def _take(move: Callable[[Tensor], object], device: str) -> Any:
    def received(nbytes: int) -> Tensor:
        found = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if nbytes:
            move(found)
        return found.cpu()

    def whole(found: dict[str, Any]) -> Any:
        if _TENSOR not in found:
            return found
        name, shape = found[_TENSOR]
        x = torch.empty(shape, dtype=_dtype(name), device="cpu")
        return received(x.nbytes).view(x.dtype).view(shape)

    length = torch.zeros(1, dtype=torch.int64, device=device)
    move(length)
    if not length:
        raise RuntimeError("another rank could not send its state: see the error on that rank")
    return json.loads(_text(received(int(length))), object_hook=whole)  # in the order in which they were given


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a state from another rank has a tensor of {name!r}; expected one of torch's dtypes")
    return found


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _text(x: Tensor) -> bytes:
    return x.cpu().numpy().tobytes()
