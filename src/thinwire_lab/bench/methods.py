"""What a bench row can be: the catalogue's methods, plain DDP, and PyTorch's own hooks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire import outer_steps, recipes, trace
from thinwire.collectives import Group
from thinwire.errors import MomentumError
from thinwire.gathers import Differences, Gathers, Lossless
from thinwire.handle import Handle
from thinwire.integrations import attach, scatter, shard
from thinwire.integrations.momentum.correction import corrections
from thinwire.integrations.momentum.first_moments import family
from thinwire.integrations.replicas.asked import sparse_weights
from thinwire.integrations.training.gradients import local
from thinwire.outer_steps import OuterSteps
from thinwire.planner import Budget
from thinwire.recipes import Method
from thinwire.reducer.owners import to_owners
from thinwire.schedules import Schedule
from thinwire.wire.layout import Layout, check_memories
from thinwire.wire.parameters import Entry

Bucket: TypeAlias = dist.GradBucket  # type: ignore[name-defined,attr-defined,unused-ignore]  # torch's stubs leave it out

Optimizers: TypeAlias = Sequence[torch.optim.Optimizer]

POWERSGD_RANK = 4
POWERSGD_START = 10
"""PyTorch's hook runs uncompressed for this many steps before it starts to compress."""


Density: TypeAlias = float | Schedule
Install: TypeAlias = Callable[[DistributedDataParallel, Optimizers, Density], Handle | None]
"""Puts a method to work on a DDP model, and returns the handle of what is thinwire's.

From then on each step counts its bytes under "sent_bytes" in the trace.
"""
InstallSharded: TypeAlias = Callable[[nn.Module, DeviceMesh, Optimizers, Density, str], Handle | None]
"""The same on a sharded model, whose mesh is islands by shards.

It works between islands; or, if one has all workers, on all that FSDP2 sends, and parameters travel as `gathers`
say, which comes last.
"""


@dataclass(frozen=True, kw_only=True)
class Benched:
    """What trains a row.

    `sparse` methods take a density; if a method warms up, the density falls to the wanted one over the first steps.
    `density` is for methods that do not use the run's own. A method that cannot work with several buckets gets a single
    one. Without `sparse_embeddings` it cannot reduce their gradients. Without `pipelines` it cannot tell the steps of a
    pipeline from its micro-batches. If `needs_sgd`, it takes over SGD's momentum, and no other optimizer's. Without
    `install_sharded` it cannot work on shards, and without `scatters` not where there are no replicas of them. If
    `shards_natively`, FSDP2 itself exchanges between the islands. With `outer_steps`, which makes them of a
    density and H, workers train on their own, and nothing is installed. If `served`, trainers of a parameter server can
    use it.
    """

    description: str
    install: Install
    sparse: bool = False
    density: float | None = None
    warms_up: bool = False
    one_bucket: bool = False
    sparse_embeddings: bool = True
    pipelines: bool = True
    needs_sgd: bool = False
    install_sharded: InstallSharded | None = None
    scatters: bool = False
    shards_natively: bool = False
    outer_steps: Callable[[float, int], OuterSteps] | None = None
    served: bool = False


def _plain(model: DistributedDataParallel, optimizers: Optimizers, density: Density) -> None:
    sparse = sparse_weights(model)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters() if p not in sparse)
    optimizers[0].register_step_pre_hook(lambda *_: _count(nbytes, model.process_group))
    for weight in sparse:
        weight.register_hook(_count_rows)


def _native(
    model: nn.Module, mesh: DeviceMesh, optimizers: Optimizers, density: Density, gathers: str, itemsize: int = 4
) -> None:
    islands, shards = mesh.shape
    whole = sum(p.numel() for p in model.parameters())
    own = sum(local(p).numel() for p in model.parameters())
    nbytes = 2 * (islands - 1) / islands * own if islands > 1 else (shards - 1) / shards * whole
    optimizers[0].register_step_pre_hook(lambda *_: trace.count("sent_bytes", itemsize * nbytes))


def _half(its_hook: Callable[..., Future[Tensor]]) -> Install:
    def install(model: DistributedDataParallel, optimizers: Optimizers, density: Density) -> None:
        def hook(state: object, bucket: Bucket) -> Future[Tensor]:
            _count(2 * bucket.buffer().numel(), model.process_group)
            with trace.span("encode"):
                return its_hook(model.process_group, bucket)

        model.register_comm_hook(None, hook)

    return install


def _powersgd(model: DistributedDataParallel, optimizers: Optimizers, density: Density) -> None:
    def hook(state: PowerSGDState, bucket: Bucket) -> Future[Tensor]:
        before = state.total_numel_after_compression
        with trace.span("encode"):
            future = powerSGD_hook(state, bucket)
        sent = (state.total_numel_after_compression - before) or bucket.buffer().numel()
        _count(4 * sent, model.process_group)
        return future

    state = PowerSGDState(
        process_group=model.process_group,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_START,
        compression_stats_logging_frequency=10**9,
    )
    model.register_comm_hook(state, hook)


def _count_rows(gradient: Tensor) -> None:
    """Count the bytes that one rank sends when DDP all-gathers a sparse gradient."""
    rows = gradient.coalesce()
    trace.count("sent_bytes", (dist.get_world_size() - 1) * (rows.indices().nbytes + rows.values().nbytes))


def _count(nbytes: float, group: Group) -> None:
    """Count the bytes that one rank sends in a ring all-reduce of `nbytes`."""
    trace.count("sent_bytes", 2 * (group.size() - 1) / group.size() * nbytes)


def _auto(model: DistributedDataParallel, optimizers: Optimizers, density: Density) -> Handle:
    assert isinstance(density, float)  # no warm-up here
    kind = family(optimizers)
    budget = Budget(densities=(density,)) if kind == "sgd" else Budget.under(kind, densities=(density,))
    return attach(model, budget, optimizer=optimizers)


def _benched(method: Method) -> Benched:
    def install(model: DistributedDataParallel, optimizers: Optimizers, density: Density) -> Handle:
        return attach(model, method.make(density), optimizer=optimizers if method.momentum else None)

    def install_sharded(
        model: nn.Module, mesh: DeviceMesh, optimizers: Optimizers, density: Density, gathers: str
    ) -> Handle:
        recipe = method.make(density)
        if mesh["replicate"].size() == 1:
            return scatter(model, recipe, mesh=mesh["shard"], gathers=GATHERS.get(gathers))
        return shard(model, recipe, mesh=mesh, optimizer=optimizers if method.momentum else None)

    return Benched(
        description=method.summary,
        install=install,
        sparse=method.density is not None,
        density=None if method.share_of == "elements" else method.density,
        warms_up=method.warms_up,
        needs_sgd=method.momentum and bool(corrections(method.make().memories())),
        install_sharded=install_sharded,
        scatters=_reaches_owners(method),
        served=_serves(method),
    )


def _nothing(model: DistributedDataParallel, optimizers: Optimizers, density: Density) -> None:
    raise TypeError("this method takes outer steps or shards, and has nothing to install in DistributedDataParallel")


def _apart(description: str, make: Callable[[float, int], OuterSteps], density: float | None = None) -> Benched:
    return Benched(
        description=f"{description}; with --outer",
        install=_nothing,
        sparse=density is not None,
        density=density,
        pipelines=False,
        outer_steps=make,
    )


def _serves(method: Method) -> bool:
    """Whether trainers of a parameter server can use this method as it is."""
    recipe, large = method.make(), Entry(name="large", shape=(1 << 12, 1 << 12), dtype=torch.float32, rows=False)
    try:
        check_memories(recipe)
        Layout([large], recipe)
    except (MomentumError, TypeError):
        return False
    return True


def _reaches_owners(method: Method) -> bool:
    try:
        to_owners(method.make())
    except TypeError:
        return False
    return True


GATHERS: Mapping[str, Gathers | None] = {
    "none": None,
    "lossless": Lossless(),
    "differences": Differences(),
    "differences2": Differences(bits=2),
}
"""How parameters of sharded models travel, in bfloat16: by FSDP2, coded, or as differences in 4 and in 2 bits."""

_DELAY = outer_steps.streaming_diloco().delay
BENCHED = {
    "fsdp_bf16": Benched(
        description="FSDP2 in bfloat16, gathers and gradients, uncompressed; with --shard, without replicas",
        install=_nothing,
        install_sharded=partial(_native, itemsize=2),
        scatters=True,
        shards_natively=True,
        pipelines=False,
    ),
    "dense": Benched(
        description="plain DistributedDataParallel, uncompressed; with --shard FSDP2's own HSDP or FSDP",
        install=_plain,
        install_sharded=_native,
        scatters=True,
        shards_natively=True,
        served=True,
    ),
    "torch_bf16": Benched(
        description="PyTorch's bf16_compress_hook", install=_half(bf16_compress_hook), sparse_embeddings=False
    ),
    "torch_fp16": Benched(
        description="PyTorch's fp16_compress_hook", install=_half(fp16_compress_hook), sparse_embeddings=False
    ),
    "torch_powersgd": Benched(
        description=f"PyTorch's powerSGD_hook, rank {POWERSGD_RANK}, in one bucket",
        install=_powersgd,
        one_bucket=True,
        sparse_embeddings=False,
    ),
    "auto": Benched(
        description='"auto": measured, decided, raced against uncompressed steps, kept up to date',
        install=_auto,
        sparse=True,
        pipelines=False,
    ),
    **{name: _benched(method) for name, method in recipes.METHODS.items() if method.benched},
    "diloco": _apart(
        "DiLoCo: every H steps all of Δ, uncompressed", lambda density, every: outer_steps.diloco(every=every)
    ),
    "streaming_diloco": _apart(
        "Streaming DiLoCo: fragments of Δ in 4 bits, while training goes on",
        lambda density, every: outer_steps.streaming_diloco(every=every, delay=min(_DELAY, every - 1)),
    ),
    "muloco": _apart(
        "MuLoCo: every H steps all of Δ and its residual, in 2 bits",
        lambda density, every: outer_steps.muloco(every=every),
    ),
    "sparseloco": _apart(
        "SparseLoCo: every H steps the largest elements of Δ and its residual, in 2 bits",
        lambda density, every: outer_steps.sparseloco(every=every, density=density),
        density=64 / 4096,
    ),
}
