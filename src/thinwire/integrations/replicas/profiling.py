"""Profiling and planning a DDP model on the machines where it will train."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checked import Fraction, checked
from thinwire.collectives import Group, backend_of
from thinwire.integrations.attachments.assembly import Optimizers, listed
from thinwire.integrations.membership.membership import agreed, raise_on_all
from thinwire.integrations.momentum.first_moments import family, movable
from thinwire.integrations.replicas.asked import bucket_caps, managed, ranks_among, sparse_weights
from thinwire.integrations.training.drift import check_alike
from thinwire.planner.candidates import Budget
from thinwire.planner.decide import TOLERANCE, decide
from thinwire.planner.plan import Plan
from thinwire.planner.probe import Backward, probe_backward, probe_candidates, probe_links, probe_tiers
from thinwire.planner.probe.links import contention, described
from thinwire.planner.probe.measure import longest
from thinwire.planner.profile import Bucket, Gradient, Profile, Timeline
from thinwire.version import __version__


@checked(on_error=raise_on_all(ranks_among))
def profile(
    model: DistributedDataParallel,
    step: Callable[[], Tensor],
    *,
    update: Callable[[], object] | None = None,
    budget: Budget | None = None,
) -> Profile:
    """Measure backward, candidates and links on all ranks at once; a collective.

    It takes seconds, longer on links with latency: the profile's `made` says how long. Gradients, buffers and random
    number generators are restored.

    Args:
        model: In DistributedDataParallel.
        step: Runs the model forward on a typical batch and returns the loss.
        update: What follows backward, such as the optimizer's step. It is timed a few times too, with gradients that
            are means over ranks. Its changes are not undone.
        budget: Its candidates are measured.

    Returns:
        The profile, the same on all ranks: `thinwire.planner.decide` plans from it, also for other links.

    Raises:
        FingerprintError: Where ranks disagree on the budget or the model.
        RuntimeError: Where `step` or `update` fails on another rank; on that one, what they raise.

    Example:
        >>> model = DistributedDataParallel(nn.Linear(64, 64))
        >>> budget = tw.Budget(names=("bf16",))
        >>> profile = tw.profile(model, lambda: model(torch.ones(1, 64)).sum(), budget=budget)
        >>> tw.planner.decide(profile, budget).choice
        {}
    """
    start, group, budget = time.perf_counter(), model.process_group, budget or Budget()
    parameters, sparse = agreed([group], lambda: managed(model)), sparse_weights(model.module)
    told = {f"parameter {name}": f"{tuple(p.shape)} {p.dtype}" for name, p in parameters.items()}
    check_alike({"budget": f"{budget}", "update": "absent" if update is None else "given", **told}, group)
    with model.no_sync():
        backward = probe_backward(step, parameters, list(model.module.buffers()), group, update=update)
    dense = {name: when for name, when in backward.ready.items() if parameters[name] not in sparse}
    found = profiled(backward._replace(ready=dense), parameters, group, budget, bucket_caps(model))
    took = longest(time.perf_counter() - start, group, next(iter(parameters.values())).device)
    return replace(found, made={**found.made, "measuring_seconds": round(took, 1)})


def profiled(
    backward: Backward, parameters: Mapping[str, nn.Parameter], group: Group, budget: Budget, caps: Sequence[int]
) -> Profile:
    """Measure links and candidates for a step whose `backward` is known; a collective.

    Args:
        backward: As `probe_backward` returns it.
        parameters: The model's. Those that `backward` knows are exchanged.
        group: All ranks.
        budget: Its candidates are measured.
        caps: The maximum bytes of DDP's buckets.

    Returns:
        The profile, the same on all ranks.
    """
    device = next(iter(parameters.values())).device
    gradients = [
        Gradient(name=name, numel=p.numel(), itemsize=p.element_size())
        for name, p in parameters.items()
        if name in backward.ready
    ]
    links, busy, unseen = probe_links(group, device, most=sum(g.nbytes for g in gradients))
    sizes, tiers = [g.numel for g in gradients], probe_tiers(group, device)
    near = {"island": {"ranks": tiers[-2].size, **asdict(tiers[-2].link)}} if len(tiers) > 1 else {}
    return Profile(
        world_size=group.size(),
        timeline=Timeline(
            buckets=tuple(Bucket(ready=backward.ready[g.name], gradients=(g,)) for g in gradients),
            computed=max([backward.computed, *backward.ready.values()]),
            rest=backward.rest,
        ).cut(caps),
        links=links,
        busy=busy,
        unseen=unseen,
        costs=probe_candidates(budget.candidates(), group, device, links, sizes) if sizes else {},
        slowdown=contention(group, device),
        tiers=described(tiers),
        made={**_circumstances(group, device), **near},
    )


@checked(on_error=raise_on_all(ranks_among))
def plan(
    model: DistributedDataParallel,
    step: Callable[[], Tensor],
    *,
    update: Callable[[], object] | None = None,
    budget: Budget | None = None,
    tolerance: Fraction = TOLERANCE,
    optimizer: Optimizers = None,
) -> Plan:
    """Measure as `profile` does, and decide what to compress and how. A collective.

    Args:
        model: In DistributedDataParallel.
        step: As in `profile`.
        update: As in `profile`.
        budget: What may be chosen; by default what was measured within 1 % of uncompressed training's loss under
            `optimizer`.
        tolerance: Among plans within this share of the fastest step, the one less harmful to the loss wins.
        optimizer: One or several, as in `attach`. They are not stepped. The plan gives its expected cost in loss with
            them.

    Returns:
        The plan: pass it to `thinwire.attach`, or read its `verdict` and `why()`.

    Raises:
        FingerprintError, RuntimeError: As `profile` does.

    Example:
        >>> model = DistributedDataParallel(nn.Linear(64, 64))
        >>> budget = tw.Budget(names=("bf16",))
        >>> plan = tw.plan(model, lambda: model(torch.ones(1, 64)).sum(), budget=budget)
        >>> handle = tw.attach(model, plan)
    """
    budget = agreed([model.process_group], lambda: _asked(model, budget, listed(optimizer)))
    return decide(profile(model, step, update=update, budget=budget), budget, tolerance=tolerance)


def _asked(
    model: DistributedDataParallel, budget: Budget | None, optimizers: Sequence[torch.optim.Optimizer]
) -> Budget:
    if budget is None:
        sparse = sparse_weights(model.module)
        budget = budget_for(Budget(), optimizers, [p for p in managed(model).values() if p not in sparse])
    return replace(budget, optimizer=budget.optimizer or family(optimizers))


def budget_for(
    budget: Budget, optimizers: Sequence[torch.optim.Optimizer], parameters: Collection[nn.Parameter]
) -> Budget:
    """Return the budget for these optimizers; methods that take momentum only if they have it for all parameters."""
    kind = family(optimizers)
    if kind is None:
        return budget
    found = Budget.under(kind, densities=budget.densities, error_feedback=budget.error_feedback)
    return found if movable(optimizers, parameters) else found.without_momentum()


def _circumstances(group: Group, device: torch.device) -> Mapping[str, str | int]:
    return {
        "world_size": group.size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": backend_of(group),
        "torch": str(torch.__version__),
        "thinwire": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
