"""Drift between replicas: finding parameters that differ between ranks, and broadcasting those of the first rank."""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import kernels
from thinwire.collectives import Group, all_gather, all_gather_plain
from thinwire.errors import FingerprintError
from thinwire.integrations.training.gradients import local
from thinwire.kernels.memory import kept
from thinwire.waits import on_host

_COLUMNS = 4096
_SHOWN = 400  # characters of a difference, at most
_ROWS = 64  # at a time in main memory: their products stay in the cache
# 64-bit elements as two halves: weights are odd, so differences of 2⁶³ would cancel.
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def differing(tensors: Mapping[str, Tensor], *groups: Group) -> list[str]:
    """Return, alike on every rank, the names of tensors whose bits differ or that some ranks lack; a collective.

    Of several groups, as of a mesh's dimensions, all ranks that they reach one after another are compared.
    """

    def everyone(mine: Any) -> list[Any]:
        found = [mine]
        for group in groups:
            found = [each for part in all_gather_plain(found, group) for each in part]
        return found

    sums = everyone(zlib.crc32("\n".join(tensors).encode()))
    if sums.count(sums[0]) < len(sums):
        named = [set(names) for names in everyone(list(tensors))]
        common = set.intersection(*named)
        return sorted(set.union(*named) - common) + differing({n: tensors[n] for n in sorted(common)}, *groups)
    if not tensors:
        return []
    rows = torch.stack([digest(local(tensor)) for tensor in tensors.values()]).view(torch.uint8)
    for group in groups:
        mine, rows = rows, rows.new_empty(group.size() * rows.numel())
        all_gather(rows, mine, group).wait()
    table = rows.view(-1, len(tensors), 8)
    same = (table == table[0]).all(dim=2).all(dim=0)
    return [name for name, equal in zip(tensors, same.tolist(), strict=True) if not equal]


def digest(x: Tensor) -> Tensor:
    """Return a hash (0-dim int64) of the bits of `x` and where they are, the same on every device.

    Rows of 4096 are multiplied by random numbers and summed. Sums are mixed and summed so, too: weights alone, such as
    a row's plus a column's, cancel where the corners of a rectangle trade places.
    """
    real = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    flat = real.contiguous().view(-1)
    bits, weights = flat.view(_INTEGER[flat.element_size()]), _weights(_COLUMNS, 0, x.device)
    sums = []
    for part in bits.split(_COLUMNS * (_ROWS if on_host(x) else _COLUMNS)):
        padding = -part.numel() % _COLUMNS
        whole = torch.nn.functional.pad(part, (0, padding)) if padding else part
        sums.append((whole.view(-1, _COLUMNS) * weights).sum(dim=1))
    rows = torch.cat(sums)
    return ((rows ^ (rows >> 32)) * _weights(rows.numel(), 1, x.device)).sum()


@kept
def _weights(count: int, seed: int, device: torch.device) -> Tensor:
    """Return random odd numbers (count), int64."""
    places = torch.arange(count, device=device)
    return kernels.mix(places, 2 * seed) << 32 | kernels.mix(places, 2 * seed + 1) | 1


def check_alike(mine: Mapping[str, str], group: Group) -> None:
    """Raise FingerprintError, on every rank, if any has something else, or in another order; a collective."""
    everyone = all_gather_plain(mine, group)
    for rank, theirs in enumerate(everyone):
        if found := difference(everyone[0], theirs):
            raise FingerprintError("{} differs: rank 0 has {}, rank {rank} has {}".format(*found, rank=rank))


def difference(first: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return in what two differ first, at last in their order, with the words of either for it; None if they agree."""
    for key in {**first, **other}:
        if first.get(key) != other.get(key):
            mine, theirs = first.get(key, "absent"), other.get(key, "absent")
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
            start = max(0, same - _SHOWN // 2)
            return key, _cut(mine, start), _cut(theirs, start)
    places = zip(first, other, strict=True)
    return next((("the order of parameters", mine, theirs) for mine, theirs in places if mine != theirs), None)


def _cut(text: str, start: int) -> str:
    return f"{'… ' * bool(start)}{text[start : start + _SHOWN]}{' …' * (len(text) > start + _SHOWN)}"


def refuse_meta(tensors: Mapping[str, Tensor]) -> None:
    """Raise TypeError if one of these has no values yet."""
    if late := [name for name, x in tensors.items() if x.is_meta]:
        raise TypeError(f"{late[0]} is on the meta device: call to_empty() and load or initialise the model first")


def check_shapes(model: nn.Module, group: Group) -> None:
    """Raise FingerprintError, on every rank, if shapes of parameters or buffers differ, frozen ones' too."""
    held = state_of(model).items()
    check_alike({f"parameter or buffer {name}": f"{tuple(x.shape)} {x.dtype}" for name, x in held}, group)


@torch.no_grad()
def start_alike(model: nn.Module, group: Group) -> None:
    """Give all ranks, whose shapes are alike, the parameters and buffers of the group's first; a collective."""
    held = [*state_of(model).values()]
    sent = [x.contiguous() for x in held]  # c10d sends memory as it lies, which may be in another order elsewhere
    raw = [x.view(-1).view(torch.uint8) for x in sent]  # as Gloo does not know every dtype
    works = [dist.broadcast(x, group=group, group_src=0, async_op=True) for x in raw]
    for work in works:
        if work is not None:
            work.wait()
    for x, arrived in zip(held, sent, strict=True):
        if x is not arrived:
            x.copy_(arrived)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, of DTensors this rank's shards."""
    return {name: local(x).detach() for some in (model.named_parameters(), model.named_buffers()) for name, x in some}
