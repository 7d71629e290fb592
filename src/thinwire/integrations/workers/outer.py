"""Outer steps: workers train on their own, and every H steps exchange how far they have moved.

The outer step is `replicate` over another model, the global parameters: Δ takes the place of the gradient, and passes
through the same recipes, memories and exchanges.
"""

import copy
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store  # torch.distributed has it, its stubs do not
from torch.nn.parallel import DistributedDataParallel

from thinwire.checked import Count, Part, Seconds, checked
from thinwire.collectives import Group, packed
from thinwire.collectives.certificates import Certificate
from thinwire.errors import FingerprintError
from thinwire.exchanges import AllGather, AllReduce
from thinwire.integrations.attachments.assembly import (
    Optimizers,
    assembled,
    check_fingerprint,
    check_free,
    check_names,
    check_real,
    described,
    listed,
    opening,
)
from thinwire.integrations.membership.membership import agreed, given_group, group_or_all, raise_on_all
from thinwire.integrations.training.drift import check_shapes, start_alike, state_of
from thinwire.integrations.training.gradients import FSDP1, is_dtensor, is_fsdp1, islands, local, reshard
from thinwire.integrations.workers.directory import found_address
from thinwire.integrations.workers.fragments import Fragment, cut
from thinwire.integrations.workers.meeting import RunningStatistics
from thinwire.integrations.workers.member import Member
from thinwire.integrations.workers.outer_handle import AT_WORK, Outer
from thinwire.integrations.workers.outer_state import plain
from thinwire.integrations.workers.swarm import Swarm
from thinwire.outer_steps import OuterSteps, made_optimizer
from thinwire.reducer import Compressed, Reducer
from thinwire.reducer.base import words
from thinwire.reducer.wrappers import Routing
from thinwire.version import __version__


@checked(on_error=raise_on_all(given_group))
def outer(
    model: nn.Module,
    optimizer: Optimizers,
    steps: OuterSteps,
    *,
    group: Group | None = None,
    samples: Count | None = None,
    offload: bool = False,
    store: str | Store | None = None,
    workers: Count = 1,
    quorum: Part = 0.75,
    grace: Seconds = 5.0,
    patience: Seconds = 300.0,
    certificate: str | os.PathLike[str] | None = None,
) -> Outer:
    """Let workers train on their own, and every H steps exchange how far they have moved; a collective of the workers.

    The first of them sends its parameters and buffers to all others. From then on each step of `optimizer` is an inner
    step. After every H of them, Δ = global − own parameters is reduced to its mean by the recipe of `steps`, the outer
    optimizer steps the global parameters with it, and the worker goes on from those. The training loop stays as it is.

    A worker whose Δ is not finite goes back to the global parameters, and the logger "thinwire" names it. The others
    take the outer step without it. Without `leave_out` they skip the step instead: global parameters and memories stay
    as they were, and each of the others goes on with its own parameters. Its next Δ then includes this one.

    Global parameters, Δ and residuals are float32 or wider, even if the model has 16-bit parameters. Running means and
    variances of batch normalisation are averaged uncompressed with the first fragment; other buffers stay each worker's
    own. Errors are raised on every worker.

    Args:
        model: Any module, which may be wrapped within an island by DistributedDataParallel, FSDP2 or `thinwire.shard`.
        optimizer: Trains the model; of several, one step of each is an inner step.
        steps: How often workers exchange, and what.
        group: The workers, by default all ranks. It has one rank of every island: those that hold the same parameters.
        samples: How many samples this worker takes in an inner step, if workers differ: Δ is then weighted by it.
        offload: Whether global parameters, outer optimizers and residuals stay in host memory and are computed there.
            The group must support CPU tensors, as Gloo does.
        store: A TCPStore through which workers find each other, and may come and go without a process group: its
            address, as in `tcp://10.0.0.1:29400`, the object itself, or `env://` under torchrun.
        workers: With a store, how many of them to wait for before the training begins.
        quorum: The share of the expected workers that an outer step needs, rounded down.
        grace: Seconds for which a quorum waits for the others. A late worker keeps its Δ and sends it with the next.
        patience: Seconds for which workers wait for a store that does not answer, once they cannot go on without it.
        certificate: With a store, a PEM file with a certificate and its key, the same on all workers: they then speak
            TLS with each other, and nobody else gets in.

    Returns:
        The handle: its `parameters` are the global ones, and `go_back()` puts them into the model.

    Raises:
        ValueError: Unless the optimizers hold exactly the parameters to train, and the fragments cover them.
        TypeError: For complex parameters.
        RuntimeError: For a recipe or an optimizer already in use, and where there is no process group.
        FingerprintError: Where workers disagree.
        MomentumError: As in `thinwire.attach`.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> handle = tw.outer(model, adamw, tw.outer_steps.diloco(every=500))
    """
    if store is None:
        unused = {"quorum": quorum, "grace": grace, "patience": patience, "certificate": certificate}
        agreed(given_group({"group": group}), lambda: _check_unused(workers=workers, **unused))
    else:
        found_address(store)
    secret = None if certificate is None else Certificate(certificate)
    with ExitStack() as failing:
        if store is not None:
            group = _alone(group, failing)
            _check_gathers(steps)
        group = group_or_all(group)
        whole = model.module if isinstance(model, DistributedDataParallel) else model
        reshard(whole)
        alone = whole is model and not any(map(is_dtensor, model.parameters()))
        if store is not None and not alone:
            raise ValueError(
                "store= cannot be combined with a model wrapped in DDP, FSDP2 or thinwire.shard: with a store each "
                "worker is one process with the whole model"
            )
        island = [model.process_group] if isinstance(model, DistributedDataParallel) else islands(whole.parameters())
        optimizers, pieces = agreed([group, *island], lambda: _checked(whole, optimizer, steps))
        own = {name: p for part in pieces for name, p in part.items()}
        weighted = f"samples {'not given' if samples is None else 'given'}"
        settings = f"outer steps {steps.settings()}, {weighted}, {described(optimizers)}"
        agreed(island, lambda: check_fingerprint(steps.recipe, own, group, settings), FingerprintError)
        agreed(island, lambda: check_shapes(whole, group), FingerprintError)
        start_alike(whole, group)
        fragments = list[Fragment]()
        for part in pieces:
            fragments.append(_fragment(part, steps, group, offload=offload))
            failing.callback(fragments[-1].attachment.end)
        frozen = {name: p for name, p in whole.named_parameters() if not p.requires_grad}
        parts = steps, fragments, optimizers, RunningStatistics(whole), frozen, samples
        if store is None:
            handle = Outer(*parts)
        else:
            packed([plain(fragment.optimizer) for fragment in fragments])  # refused here, not where somebody joins
            terms = f"thinwire {__version__}, {words(steps.recipe)} {settings} {plain(fragments[0].optimizer)}"
            shapes = [f"{n}: {tuple(x.shape)} {x.dtype}{', trained' * (n in own)}" for n, x in state_of(whole).items()]
            swarm = Swarm(
                store,
                f"{terms} {shapes}",
                steps.following,
                workers=workers,
                quorum=quorum,
                grace=grace,
                patience=patience,
                certificate=secret,
            )
            failing.callback(swarm.close, goodbye=True)
            handle = Member(swarm, *parts)
        failing.callback(handle.remove)
        handle.watch(whole)
        failing.pop_all()
    return handle


def _check_unused(**options: object) -> None:
    """Raise ValueError if any of what only goes with a store is not as by default."""
    defaults = signature(outer).parameters
    if given := [f"{name}={value!r}" for name, value in options.items() if value != defaults[name].default]:
        raise ValueError(
            f"{', '.join(given)} given without store=: pass the address of one, as in store='tcp://10.0.0.1:29400', or "
            "leave that out: a process group has all its workers from the start, waits for all, and to encrypt what it "
            "sends use a VPN"
        )


def _alone(group: Group | None, failing: ExitStack) -> Group:
    """Return a group of this process alone, which ends with `failing`. Raises ValueError if another one was given."""
    if group is not None:
        raise ValueError(
            "group and store are both given, and with a store workers form no group: leave one of them out"
        )
    if not dist.is_initialized():
        store: Any = dist  # which does not export it, as mypy has it
        dist.init_process_group("gloo", store=store.HashStore(), rank=0, world_size=1)
        failing.callback(dist.destroy_process_group)
    found = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    failing.callback(dist.destroy_process_group, found)
    return found


def _check_gathers(steps: OuterSteps) -> None:
    """Raise ValueError unless a worker's share is one message, and decided on before the next is sent."""
    todo: list[Reducer] = [steps.recipe]
    for each in todo:
        if isinstance(each, Routing):
            todo += each.children()
        elif not isinstance(each, Compressed) or not isinstance(each.exchange, AllGather | AllReduce):
            raise ValueError(
                f"with a store each worker sends one message, and {words(each):.100} takes several rounds: use a "
                "recipe with AllGather or AllReduce, such as that of outer_steps.sparseloco()"
            )
    ticks = list(accumulate(range(steps.parts), lambda tick, _: steps.following(tick), initial=steps.following(0)))
    if steps.delay >= min(after - before for before, after in pairwise(ticks)):
        raise ValueError(
            f"delay is {steps.delay}, and with a store an exchange must be over before the next begins: expected less, "
            "or fewer fragments"
        )


def _fragment(own: Mapping[str, nn.Parameter], steps: OuterSteps, group: Group, *, offload: bool = False) -> Fragment:
    """Return a fragment of these, with a recipe and an outer optimizer of its own. A collective."""
    parameters = {name: nn.Parameter(_wide(local(p).detach(), offload=offload)) for name, p in own.items()}
    optimizer = agreed([group], lambda: made_optimizer(steps.make_optimizer, [*parameters.values()]))
    attachment = assembled(
        [group],
        copy.deepcopy(steps.recipe),
        parameters,
        settings=f"outer steps by {type(optimizer).__name__} {plain(optimizer)}",
        optimizers=[optimizer],
        scaler=torch.amp.GradScaler(enabled=False),  # Δ has no loss scale, though a scaler may take the inner step
    )
    with opening(attachment):
        return Fragment(own, attachment, optimizer)


def _wide(x: Tensor, *, offload: bool) -> Tensor:
    """Return a copy in float32 or wider; in host memory, pinned if `x` is on a GPU, with `offload`."""
    copied = x.to("cpu" if offload else x.device, torch.promote_types(x.dtype, torch.float32), copy=True)
    return copied.pin_memory() if offload and x.is_cuda else copied


def _checked(
    whole: nn.Module, optimizer: Optimizers, steps: OuterSteps
) -> tuple[list[torch.optim.Optimizer], list[dict[str, nn.Parameter]]]:
    """Return the optimizers and the fragments' parameters. Raises whatever is wrong on this rank alone."""
    check_free(steps.recipe)
    optimizers = listed(optimizer)
    if not optimizers:
        raise TypeError("optimizer is None; expected the torch.optim.Optimizer that trains the model, or several")
    if busy := AT_WORK.intersection(optimizers):
        raise RuntimeError(
            f"outer steps already follow the steps of this {type(busy.pop()).__name__}; call remove() on their handle "
            "before you make another"
        )
    if is_fsdp1(whole):
        raise TypeError(FSDP1)
    parameters = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("the model has no trainable parameters: unfreeze some, or call outer() before they are frozen")
    check_real(parameters)
    check_names(steps.recipe, dict(whole.named_parameters()))
    _check_owned(parameters, optimizers)
    return optimizers, cut({name: p for name, p in parameters.items() if local(p).numel()}, steps.fragments)


def _check_owned(parameters: Mapping[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise ValueError unless the optimizers hold these parameters, and no others that are trained."""
    held = {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}
    if free := [name for name, p in parameters.items() if id(p) not in held]:
        raise ValueError(
            f"the optimizer does not hold {free[0]!r} and {len(free) - 1} more of the model's {len(parameters)} "
            "parameters: pass the one that trains the model (all, if there are several), or freeze those that "
            "no optimizer trains"
        )
    known = {id(p) for p in parameters.values()}
    if strangers := sum(p.requires_grad and key not in known for key, p in held.items()):
        raise ValueError(
            f"the optimizer holds {strangers} parameters that the model lacks, and workers would drift apart in them: "
            "pass a module that has them all, such as nn.ModuleList([encoder, decoder])"
        )
