"""All-gather, all-to-all, all-reduce and process groups, as torch's versions and backends have them.

Why pieces? Two ranks have one connection, and Gloo's gathers and all-to-alls use it one way at a time: they take 1.5 to
2 times as long as the link does. While one piece is sent, another arrives. In a ring of three ranks or more, bytes come
on one connection and leave on another, so whole tensors flow both ways; and so they do where `Peers` receives first.
"""

import itertools
import weakref
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from thinwire import kernels
from thinwire.collectives.exit import lend

Group = dist.ProcessGroup

# 2.13 renamed all_gather_into_tensor to all_gather_single and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


PIECE, PIECES = 1 << 17, 16
"""The bytes of a piece, and the number of them from which on pieces grow instead."""


def all_gather(out: Tensor, mine: Tensor, group: Group) -> "Future[Any]":
    """Start gathering every rank's `mine` into `out`, which is world size times as long. The one all-gather of tensors.

    A sparse tensor is gathered by torch within `all_reduce`.
    """
    step = _step(mine, mine.numel(), group)
    return gather_whole(out, mine, group) if step is None else gather_pieces(out, mine, step, group)


def gather_whole(out: Tensor, mine: Tensor, group: Group) -> "Future[Any]":
    """Start gathering in one collective."""
    return _all_gather(lend(out), lend(mine), group=group, async_op=True).get_future()


def gather_pieces(out: Tensor, mine: Tensor, step: int, group: Group) -> "Future[Any]":
    """Start gathering so many elements at a time."""
    cut = zip(*(x.split(step) for x in (mine, *out.view(group.size(), -1))), strict=True)
    works = [dist.all_gather([lend(x) for x in rows], lend(x), group, async_op=True) for x, *rows in cut]
    return collect_all([work.get_future() for work in works])


def all_to_all(out: Tensor, mine: Tensor, sizes: Sequence[int], group: Group) -> "Future[Any]":
    """Start sending `sizes[r]` elements of `mine` to each rank r, in order. `out` takes an equal share from each.

    The sizes are the same on all ranks.
    """
    shares = [out.numel() // group.size()] * group.size()
    step = _step(mine, max(sizes), group)
    if step is None:
        work = dist.all_to_all_single(lend(out), lend(mine), shares, list(sizes), group=group, async_op=True)
        return work.get_future()
    own, other = group.rank(), 1 - group.rank()
    arriving, leaving = out.split(shares), mine.split(list(sizes))
    arriving[own].copy_(leaving[own])
    cut = zip_longest(arriving[other].split(step), leaving[other].split(step), fillvalue=mine[:0])
    return collect_all([_swap(x, y, other, group).get_future() for x, y in cut])


def _swap(arriving: Tensor, leaving: Tensor, other: int, group: Group) -> dist.Work:
    """Start sending to the other one of two ranks, and receiving from it."""
    inward, outward = [0, 0], [0, 0]
    inward[other], outward[other] = arriving.numel(), leaving.numel()
    return dist.all_to_all_single(lend(arriving), lend(leaving), inward, outward, group=group, async_op=True)


def _step(x: Tensor, numel: int, group: Group) -> int | None:
    """Return how many of these elements make a piece, or None where they travel whole."""
    if group.size() != 2 or numel * x.element_size() <= PIECE or x.device.type != "cpu" or group.name() != "gloo":
        return None
    return max(PIECE // x.element_size(), -(-numel // PIECES))


def all_reduce(x: Tensor, group: Group) -> dist.Work:
    """Start summing `x` over the ranks, in place. If it is sparse, only the future's value holds the sum."""
    return dist.all_reduce(lend(x), group=group, async_op=True)


def all_or(flags: Tensor, group: Group) -> tuple[Tensor, int]:
    """Return, as bool, which of the int16 `flags` (0 or 1) are set on any rank, and how many bytes were reduced."""
    if dist.get_backend(group) == "nccl":  # NCCL has no bitwise OR
        whole = flags.to(torch.uint8)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
        return whole.bool(), whole.nbytes
    bits = kernels.pack_bits(flags, 1)
    dist.all_reduce(bits, op=dist.ReduceOp.BOR, group=group)
    return kernels.unpack_bits(bits, flags.numel(), 1).bool(), bits.nbytes


def plain_device(group: Group) -> str:
    """Return the kind of device from which the group's backend takes tensors, main memory if it can."""
    found: str = dist.distributed_c10d._get_object_coll_device(group)
    return found


def same_group(group: Group) -> Group:
    """Return a new group of the same ranks. A collective among these ranks only.

    Raises RuntimeError if ranks of a subgroup are in different numbers of groups: torch names a new group by that.
    """
    if group in _twins:
        return _twins[group]
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    whole = len(ranks) == dist.get_world_size()
    if not whole:
        _check_names_agree(group)
    return dist.new_group(ranks, backend=backend, timeout=_timeout(group), use_local_synchronization=not whole)


def adopt_group(group: Group, twin: Group, backend: str, store: object) -> None:
    """Make torch know a group that it has not made itself, and whose other ranks are of other jobs.

    `twin`: another group of the same ranks, for `same_group`. Only this rank has its own number in torch's world; the
    others get numbers that no rank of this job has.
    """
    world: Any = dist.distributed_c10d._world
    mine = dist.get_rank()
    for each in (group, twin):
        others = itertools.count(dist.get_world_size())
        ranks = {mine if rank == each.rank() else next(others): rank for rank in range(each.size())}
        world.pg_map[each], world.pg_group_ranks[each] = (backend, store), ranks
        world.pg_names[each] = f"adopted {next(_numbers)}"
        world.pg_backend_config[each], world.pg_to_tag[each] = f"cpu:{backend}", ""
    _twins[group] = twin


def forget_group(group: Group) -> None:
    """Make torch forget an adopted group and its twin. What is under way there fails."""
    world: Any = dist.distributed_c10d._world
    for each in (group, _twins.pop(group, group)):
        for held in (world.pg_map, world.pg_group_ranks, world.pg_names, world.pg_backend_config, world.pg_to_tag):
            held.pop(each, None)
        each.abort()


_twins: weakref.WeakKeyDictionary[Group, Group] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def end_group(group: Group) -> None:
    """Make torch forget an idle Gloo group, which is not a collective. Groups of other backends stay."""
    if group in dist.distributed_c10d._world.pg_map and dist.get_backend(group) == "gloo":
        dist.destroy_process_group(group)


def _check_names_agree(group: Group) -> None:
    found = torch.empty(group.size(), dtype=torch.int64, device=plain_device(group))
    all_gather(found, found.new_tensor([len(dist.distributed_c10d._world.pg_names)]), group).wait()
    counts = found.tolist()
    if len(set(counts)) > 1:
        raise RuntimeError(
            f"ranks of this subgroup are in {counts} process groups, and torch needs equal numbers to make another: "
            "create groups in equal numbers on all its ranks before attaching"
        )


def _timeout(group: Group) -> object:
    return group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")).options._timeout
