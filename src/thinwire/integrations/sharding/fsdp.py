"""What FSDP2 has made of a model: over which ranks it is sharded, and how it reduces gradients.

`fully_shard` has setters and no getters, so `_groups` reads names that are private in torch.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import Group
from thinwire.integrations.training.drift import refuse_meta
from thinwire.integrations.training.gradients import FSDP1, is_dtensor, is_fsdp1, reshard


def sharded_parameters(model: nn.Module, ignored: Collection[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return what FSDP reduces, by name; TypeError unless all others are frozen or `ignored`, or for none."""
    _check_kind(model, ignored)
    reshard(model)  # what an evaluation has left whole is no DTensor
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p not in ignored}
    if not any(map(is_dtensor, trained.values())):
        raise TypeError(
            f"no parameter of {type(model).__name__} is sharded: call fully_shard(model, mesh=mesh[...]) first; for "
            "whole replicas there are attach and replicate"
        )
    for name, p in trained.items():
        if not is_dtensor(p):
            raise TypeError(
                f"{name} is a plain parameter beside sharded ones, and nothing would reduce its gradient: call "
                "fully_shard on the module that holds it, freeze it, or name it in ignored_params= and reduce it "
                "yourself"
            )
        if p.is_complex():
            raise TypeError(f"{name} is complex: keep it as torch.view_as_real")
    refuse_meta(trained)
    return trained


def _check_kind(model: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    modules = sharded_modules(model)
    if is_fsdp1(model):
        raise TypeError(FSDP1)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError("DistributedDataParallel keeps whole replicas: call thinwire.attach on it")
    if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in _groups(modules)):
        raise TypeError(
            "with CPUOffloadPolicy, FSDP copies gradients to the host while thinwire would read them: call "
            "fully_shard without offload_policy"
        )
    if any(p in ignored and p.requires_grad for p in held_parameters(modules)):
        raise TypeError(
            "ignored_params names a sharded parameter, whose gradient FSDP reduces: freeze it, or pass it to "
            "fully_shard(..., ignored_params=...), too, and reduce its gradient yourself"
        )


def check_rows(parameters: Mapping[str, Any]) -> None:
    """Raise TypeError unless these DTensors are cut by rows, without replicas, and not in float16."""
    for name, p in parameters.items():
        if any(each.is_replicate() for each in p.placements):
            raise TypeError(
                f"{name} has replicas, as it is placed as {p.placements}, and FSDP itself exchanges between them: call "
                'fully_shard(module, mesh=mesh["shard"]) and thinwire.shard(model, recipe, mesh=mesh)'
            )
        if any(not each.is_shard(0) for each in p.placements) or p.dtype == torch.float16:
            raise TypeError(
                f"{name} is {p.dtype}, placed as {p.placements}; expected rows in float32, float64 or bfloat16: leave "
                "out shard_placement_fn, and keep float16 for the computation (param_dtype)"
            )


def check_averaged(modules: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise TypeError unless FSDP averages these gradients. In other dtypes it divides them by what we cannot see."""
    names = {p: name for name, p in parameters.items()}
    for each in (each for group in _groups(modules) for each in group.fsdp_params):
        p, policy = each.sharded_param, each.mp_policy
        own = getattr(each, "sharded_grad_dtype", policy.param_dtype)  # before torch 2.15 gradients had no other
        reduced = policy.reduce_dtype or own or p.dtype
        if p in names and reduced not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"FSDP reduces the gradient of {names[p]} in {reduced}; expected float32 or bfloat16: call "
                "fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )


def check_gathered(model: nn.Module, sharers: Sequence[Group]) -> None:
    """Raise TypeError where FSDP gathers other things than parameters by rows, each `fully_shard` those of one dtype.

    `sharers`: the groups of ranks that hold them together.
    """
    modules, names = sharded_modules(model), {p: name for name, p in model.named_parameters()}
    found: set[Any] = held_parameters(modules)
    if len(sharers) > 1 or any(not each.is_shard(0) for p in found for each in p.placements):
        raise TypeError(
            "gathers= needs parameters that are sharded by rows over one dimension of the mesh: leave it out"
        )
    refuse_meta({name: p for p, name in names.items() if p in found})
    for module in modules:
        groups = list(_groups([module]))
        if len(groups) > 1:
            raise TypeError(
                f"fully_shard has sharded {type(module).__name__} over several meshes, and gathers= supports one: "
                "leave out shard_placement_fn"
            )
        for group in groups:
            held = ((each.sharded_param, each.mp_policy) for each in group.fsdp_params)
            dtypes = {names[p]: policy.param_dtype or p.dtype for p, policy in held}
            if len(set(dtypes.values())) > 1:
                raise TypeError(
                    f"fully_shard gathers {dtypes} as bytes, which gathers= cannot read: give each dtype its own "
                    "fully_shard, or pass mp_policy=MixedPrecisionPolicy(param_dtype=...)"
                )
            if any(hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather") for each in group.fsdp_params):
                raise TypeError(
                    f"parameters of {type(module).__name__} bring their own all-gather (fsdp_pre_all_gather, as "
                    "torchao's float8 does): leave out gathers="
                )


def records(module: Any) -> list[Any]:
    """Return what FSDP knows of each parameter, frozen ones too, that it gathers in one go for this module, in order.

    A record's `sharded_param` is the parameter that is there now: `load_state_dict(assign=True)` replaces it.
    """
    return [each for group in _groups([module]) for each in group.fsdp_params]


def refuse_sharded(model: object, verb: str) -> None:
    """Raise TypeError for a model whose parameters are sharded, by FSDP2 or FSDP1."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    if any(is_dtensor(p) for p in parameters):
        raise TypeError(
            f"{verb} takes whole parameters, and those of this {type(model).__name__} are sharded: use "
            "thinwire.shard(model, recipe, mesh=mesh)"
        )
    if isinstance(model, nn.Module) and is_fsdp1(model):
        raise TypeError(
            f"{verb} takes whole parameters, and {FSDP1}, then use thinwire.shard(model, recipe, mesh=mesh)"
        )


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called with."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def mesh_groups(given: Mapping[str, object]) -> list[Group]:
    """Return the groups of the mesh among these arguments, one for each dimension. None for what is no mesh."""
    mesh = given.get("mesh")
    if isinstance(mesh, DeviceMesh):
        return mesh.get_all_groups()
    return [mesh] if isinstance(mesh, Group) else []


def replicate_group(mesh: DeviceMesh | Group, sharers: Sequence[Group], parameters: Iterable[Any]) -> Group:
    """Return the ranks with the same shard: the one dimension of `mesh` that FSDP does not use, or ValueError.

    `sharers`: the groups of several ranks that FSDP uses for these DTensors.
    """
    sharing = {rank for group in sharers for rank in dist.get_process_group_ranks(group)}
    groups = mesh_groups({"mesh": mesh})
    found = [g for g in groups if len(sharing.intersection(dist.get_process_group_ranks(g))) <= 1]
    if sharers:  # FSDP may use a dimension of one rank as well
        used = [group for each in {p.device_mesh for p in parameters} for group in each.get_all_groups()]
        found = [g for g in found if g not in used]
    found = [g for g in found if g.size() > 1] or found[:1]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"{mesh} has {len(found)} dimensions over which the model is replicated: pass the group of one"
        )
    raise ValueError(
        f"FSDP shards the parameters over every rank of {mesh}, which leaves no replicas: make a mesh of two "
        'dimensions, init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard")), and call '
        'fully_shard(module, mesh=mesh["shard"]) and shard(model, recipe, mesh=mesh); or call thinwire.scatter'
    )


def exchanges_now(modules: Iterable[nn.Module]) -> bool:
    """Whether the gradients of this backward are to be exchanged, as `set_requires_all_reduce` and others have said."""
    return _same({group.all_reduce_grads for group in _groups(modules)}, "whether to reduce gradients")


def averages(modules: Iterable[nn.Module]) -> bool:
    """Whether FSDP averages gradients over ranks. With `set_gradient_divide_factor`, it sums and divides by that."""
    return _same({group.gradient_divide_factor is None for group in _groups(modules)}, "a gradient divide factor")


def _same(found: set[bool], what: str) -> bool:
    if len(found) != 1:
        raise RuntimeError(f"fully_shard's modules differ in {what}: set it for all of them")
    return found.pop()


def held_parameters(modules: Iterable[Any]) -> set[nn.Parameter]:
    """Return the sharded parameters that FSDP looks after now, trained or not."""
    return {each.sharded_param for group in _groups(modules) for each in group.fsdp_params}


def _groups(modules: Iterable[Any]) -> Iterator[Any]:
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # there may be several from torch 2.12 on
        yield from groups if groups is not None else filter(None, [state._fsdp_param_group])
