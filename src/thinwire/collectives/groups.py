"""Process groups, as torch's versions and backends have them."""

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import kernels

Group = dist.ProcessGroup


def all_or(flags: Tensor, group: Group) -> tuple[Tensor, int]:
    """Return, as bool, which of the int16 `flags` (0 or 1) are set on any rank, and how many bytes were reduced."""
    if dist.get_backend(group) == "nccl":  # NCCL has no bitwise OR
        whole = flags.to(torch.uint8)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
        return whole.bool(), whole.nbytes
    bits = kernels.pack_bits(flags, 1)
    dist.all_reduce(bits, op=dist.ReduceOp.BOR, group=group)
    return kernels.unpack_bits(bits, flags.numel(), 1).bool(), bits.nbytes


def backend_of(group: Group) -> str:
    """Return the name of the group's backend, such as gloo."""
    return dist.get_backend(group)


def plain_device(group: Group) -> str:
    """Return the kind of device from which the group's backend takes tensors, main memory if it can."""
    found: str = dist.distributed_c10d._get_object_coll_device(group)
    return found


def same_group(group: Group) -> Group:
    """Return a new group of the same ranks; a collective, which fails where they are in different numbers of groups."""
    if group in _twins:
        return _twins[group]
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    whole = len(ranks) == dist.get_world_size()
    if not whole:
        found = torch.empty(group.size(), dtype=torch.int64, device=plain_device(group))
        dist.all_gather(list(found.split(1)), found.new_tensor([len(dist.distributed_c10d._world.pg_names)]), group)
        counts = found.tolist()
        if len(set(counts)) > 1:
            raise RuntimeError(
                f"the ranks of this subgroup are in {counts} process groups, and torch can make another only if these "
                "numbers are equal: before attaching, create the same number of groups on each of these ranks"
            )
    options = group._get_backend(torch.device("cuda" if backend == "nccl" else "cpu")).options
    return dist.new_group(ranks, backend=backend, timeout=options._timeout, use_local_synchronization=not whole)


def adopt_group(group: Group, twin: Group, store: object) -> None:
    """Make torch know a Gloo group with ranks of other jobs, which it has not made, and its `twin` for `same_group`."""
    world: Any = dist.distributed_c10d._world
    mine = dist.get_rank()
    for each in (group, twin):
        others = itertools.count(dist.get_world_size())
        ranks = {mine if rank == each.rank() else next(others): rank for rank in range(each.size())}
        world.pg_map[each], world.pg_group_ranks[each] = ("gloo", store), ranks
        world.pg_names[each] = f"adopted {next(_numbers)}"
        world.pg_backend_config[each], world.pg_to_tag[each] = "cpu:gloo", ""
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
