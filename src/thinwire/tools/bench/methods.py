"""What a bench row can be: thinwire's recipes, plain DDP, and PyTorch's own hooks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire import recipes, trace
from thinwire.exchanges.compat import Group
from thinwire.integrations import attach
from thinwire.integrations.managed import sparse_weights
from thinwire.planner import Budget
from thinwire.reducer import Reducer
from thinwire.schedules import Schedule

Bucket: TypeAlias = dist.GradBucket  # type: ignore[name-defined,attr-defined,unused-ignore]  # torch's stubs leave it out

POWERSGD_RANK = 4
POWERSGD_START = 10
"""PyTorch's hook runs uncompressed for this many steps before it starts to compress."""


class Install(Protocol):
    """Puts a method to work on a DDP model. From then on each step counts its bytes under "sent_bytes" in the trace."""

    def __call__(
        self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, density: float | Schedule
    ) -> None:
        """Install."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """`sparse` methods take a density, which falls to the wanted one over the first steps of those that warm up.

    `density` is that of methods to which the run's own does not apply. A method that cannot work with several buckets
    gets one, one without `sparse_embeddings` cannot reduce their gradients, and one without `pipelines` cannot tell the
    steps of a pipeline from its micro-batches.
    """

    description: str
    install: Install
    sparse: bool = False
    density: float | None = None
    warms_up: bool = False
    one_bucket: bool = False
    sparse_embeddings: bool = True
    pipelines: bool = True


def _plain(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, density: float | Schedule) -> None:
    sparse = sparse_weights(model)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters() if p not in sparse)
    optimizer.register_step_pre_hook(lambda *_: _count(nbytes, model.process_group))
    for weight in sparse:
        weight.register_hook(_count_rows)


def _fp16(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, density: float | Schedule) -> None:
    def hook(state: object, bucket: Bucket) -> Future[Tensor]:
        _count(2 * bucket.buffer().numel(), model.process_group)
        with trace.span("encode"):
            return fp16_compress_hook(model.process_group, bucket)

    model.register_comm_hook(None, hook)


def _powersgd(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, density: float | Schedule) -> None:
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
    """Count what DDP's all-gathers of a sparse gradient make one rank send."""
    rows = gradient.coalesce()
    trace.count("sent_bytes", (dist.get_world_size() - 1) * (rows.indices().nbytes + rows.values().nbytes))


def _count(nbytes: float, group: Group) -> None:
    """Count what a ring all-reduce of `nbytes` makes one rank send."""
    trace.count("sent_bytes", 2 * (group.size() - 1) / group.size() * nbytes)


def _recipe(make: Callable[..., Reducer], *, momentum: bool = False) -> Install:
    def install(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, density: float | Schedule) -> None:
        attach(model, make(density=density), optimizer=optimizer if momentum else None)

    return install


def _auto(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, density: float | Schedule) -> None:
    assert isinstance(density, float)  # no warm-up here
    attach(model, plan=Budget(densities=(density,)))


def _fixed(make: Callable[[], Reducer]) -> Install:
    return _recipe(lambda density: make())


METHODS = {
    "dense": Method(description="plain DistributedDataParallel, uncompressed", install=_plain),
    "torch_fp16": Method(description="PyTorch's fp16_compress_hook", install=_fp16, sparse_embeddings=False),
    "torch_powersgd": Method(
        description=f"PyTorch's powerSGD_hook, rank {POWERSGD_RANK}, in one bucket",
        install=_powersgd,
        one_bucket=True,
        sparse_embeddings=False,
    ),
    "auto": Method(
        description='plan="auto": measured, decided, raced against uncompressed steps, kept up to date',
        install=_auto,
        sparse=True,
        pipelines=False,
    ),
    "topk": Method(description="exact Top-k with error feedback", install=_recipe(recipes.topk), sparse=True),
    "dgc": Method(
        description="Deep Gradient Compression: sampled threshold, momentum correction, density warm-up",
        install=_recipe(recipes.dgc, momentum=True),
        sparse=True,
        warms_up=True,
    ),
    "dragonn": Method(
        description="DRAGONN: hashed slots, momentum correction, density warm-up",
        install=_recipe(recipes.dragonn, momentum=True),
        sparse=True,
        warms_up=True,
    ),
    "randomk": Method(
        description="Random-k with error feedback, summed on the way", install=_recipe(recipes.randomk), sparse=True
    ),
    "gtopk": Method(
        description="gTop-k: the global Top-k up and down a tree, with error feedback",
        install=_recipe(recipes.gtopk),
        sparse=True,
    ),
    "s2_reducer": Method(
        description="S2 Reducer: block Top-k, a bitmap and a count sketch summed on the way",
        install=_recipe(recipes.s2_reducer),
        sparse=True,
        density=1 / 32,
    ),
    "s2_union": Method(
        description="the same blocks without the sketch: the union's values, summed exactly",
        install=_recipe(partial(recipes.s2_reducer, packed=None)),
        sparse=True,
        density=1 / 32,
    ),
    "fft": Method(
        description="FFT sparsification with a 10-bit offset float, nothing kept, as in the paper",
        install=_recipe(recipes.fft),
        sparse=True,
        density=0.15,
    ),
    "dct_dp": Method(
        description="a threshold per tensor kept for 1,000 steps, with error feedback",
        install=_recipe(recipes.dct_dp),
        sparse=True,
    ),
    "dct_steered": Method(
        description="the same with a threshold steered to the wanted density",
        install=_recipe(partial(recipes.dct_dp, life=None)),
        sparse=True,
    ),
    "mstopk": Method(
        description="Top-k by bisection of a threshold, with error feedback",
        install=_recipe(recipes.mstopk),
        sparse=True,
    ),
    "qsgd": Method(description="QSGD: 4 bits per value, stochastic", install=_fixed(recipes.qsgd)),
    "terngrad": Method(
        description="TernGrad: 2 bits per value, clipped at 2.5 sigma", install=_fixed(recipes.terngrad)
    ),
    "signsgd": Method(description="1 bit per value, with error feedback", install=_fixed(recipes.signsgd)),
    "powersgd": Method(
        description=f"PowerSGD of thinwire, rank {POWERSGD_RANK}, in DDP's buckets",
        install=_fixed(partial(recipes.powersgd, rank=POWERSGD_RANK, start=POWERSGD_START)),
    ),
}
