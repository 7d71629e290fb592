"""What a worker process does for `thinwire plan`: measure a model, or for `--explain` how its script trains it."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.checked import Amount, Count, Positive, Size, checked
from thinwire.collectives import Group
from thinwire.exchanges import Link
from thinwire.integrations.momentum.first_moments import family
from thinwire.integrations.replicas.profiling import budget_for, profile, profiled
from thinwire.integrations.sharding.fsdp import sharded_modules
from thinwire.integrations.training.gradients import FSDP1, is_dtensor, is_fsdp1
from thinwire.planner import Budget, Profile
from thinwire.planner.probe import Backward, probe_backward, probe_links
from thinwire.planner.probe.measure import hosts, longest, stamp
from thinwire.planner.profile import check_carries
from thinwire.planner.reading import built
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group, wrapped
from thinwire_lab.inputs import BadInput
from thinwire_lab.plan.gathers import probe_gathers
from thinwire_lab.plan.subject import Subject, of_bench, of_user

_WARMUP, _REPEATS = 1, 3
_FREE = Link(latency=0.0, bandwidth=1e15)
_CAPS = (1 << 20, 25 << 20)  # of DDP's buckets


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Script:
    """What was measured of a script's step. Bytes and counts are of a step, bytes of whole tensors.

    Args:
        seconds: Of a step as it is.
        shards, replicas: Ranks that hold the model together, and how often there are such.
        modules: How many times `fully_shard` was called.
        gathers, gathered: All-gathers of parameters, and their bytes.
        reductions, reduced: Reduce-scatters of gradients, and their bytes.
        itemsize: Bytes of a gathered element.
        crossing: Whether those who hold it together are on several islands.
        near, between: The links among those who hold the model together, and between replicas.
        held, room: Bytes of the whole model with gradients and optimizer, and of a rank's memory.
    """

    seconds: Positive
    shards: Count = 1
    replicas: Count = 1
    modules: Size = 0
    gathers: Amount = 0.0
    gathered: Amount = 0.0
    reductions: Amount = 0.0
    reduced: Amount = 0.0
    itemsize: Count = 2
    crossing: bool = True
    near: Link = _FREE
    between: Link = _FREE
    held: Size = 0
    room: Size = 0

    @classmethod
    def of(cls, profile: Profile) -> Self | None:
        """Return what the profile has of a script, or None if it was not measured for `--explain`; or BadInput."""
        if (found := profile.made.get("script")) is None:
            return None
        try:
            script = cast(Self, built(cls, found, "made.script"))
            for name, link in (("near", script.near), ("between", script.between)):
                check_carries(link, f"made.script.{name}")
            if script.modules and not (script.gathers and script.reductions):
                raise ValueError(
                    f"made.script.gathers is {script.gathers} and reductions {script.reductions}; expected more than 0 "
                    f"of {script.modules} sharded modules"
                )
            return script
        except ValueError as error:
            raise BadInput(
                f"the profile's script is {found!r:.100} ({error}); expected what this version measures: measure anew"
            ) from error


def explained(subject: Subject, budget: Budget) -> Profile:
    """Measure a subject's step as its script has it, and what else a profile has; a collective.

    A module that is neither sharded nor in DDP is wrapped in DDP. What is sharded cannot be used afterwards.
    """
    sharded, everyone = bool(sharded_modules(subject.module)), cast(Group, dist.group.WORLD)
    model: nn.Module = subject.module if sharded else (replicas := wrapped(subject.module))
    seconds, update = _steps(model, subject)
    budget = replace(budget, names=tuple(dict.fromkeys([*budget.names, "qsgd"])))  # what scatter is explained with
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first = next(iter(trained.values()))
    sharding = dict[str, Any]()
    if sharded:
        backward, sharding = _without_network(model, subject, everyone)
        found = profiled(backward._replace(rest=update), trained, everyone, budget, _CAPS)
        sharding |= _sharers(next(filter(is_dtensor, model.parameters())), found.made.get("island", {}).get("ranks", 1))
    else:
        found = profile(replicas, lambda: subject.loss(model), update=subject.update, budget=budget)
    elements = sum(p.numel() for p in model.parameters())
    shard = elements // sharding.get("shards", everyone.size())
    dtype = torch.float32 if sharding.get("itemsize") == 4 else torch.bfloat16
    sizes = [max(1, shard // parts) for parts in (1, 16)]
    script = Script(
        seconds=longest(seconds, everyone, first.device),
        held=_held(model, subject.optimizers),
        room=_room(first.device, everyone),
        **sharding,
    )
    gathers = probe_gathers(everyone, first.device, sizes, dtype)
    return replace(
        found, gathers=gathers, made={**found.made, "script": asdict(script), "settings": complaints(os.environ)}
    )


def _steps(model: nn.Module, subject: Subject) -> tuple[float, float]:
    """Return the seconds of the fastest of a few steps on this rank, and those of its update."""
    device, steps = next(model.parameters()).device, []
    for _ in range(_WARMUP + _REPEATS):
        model.zero_grad()
        start = stamp(device)
        subject.loss(model).backward()
        reduced = stamp(device)
        if subject.update is not None:
            subject.update()
        end = stamp(device)
        steps.append((end.since(start), end.since(reduced)))
    return min(steps[_WARMUP:])


@final
class _Silent:
    """Stands in for a collective of FSDP's. It sends nothing, and counts what FSDP would have sent.

    Later computing is with wrong numbers, and takes as long as with the right ones.
    """

    def __init__(self) -> None:
        self.calls, self.nbytes, self.itemsize = 0, 0, 2

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP to fill."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, *how: object, **more: object) -> None:
        """Give every rank's part as this one's, and count the larger tensor."""
        longer = max(output_tensor, input_tensor, key=Tensor.numel)
        self.calls, self.nbytes, self.itemsize = self.calls + 1, self.nbytes + longer.nbytes, longer.element_size()
        width = min(output_tensor.numel(), input_tensor.numel())
        mine = input_tensor.view(-1, width)[:1].clone()  # it may be a part of the output
        output_tensor.view(-1, width).copy_(mine)


def _without_network(model: nn.Module, subject: Subject, everyone: Group) -> tuple[Backward, dict[str, Any]]:
    """Time a sharded model's backward without exchanges. Return it, and what FSDP sends in a step, for `Script`."""
    gather, reduce, steps = _Silent(), _Silent(), 0
    for module in (modules := sharded_modules(model)):
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
        module.set_requires_all_reduce(False, recurse=False)

    def loss() -> Tensor:
        nonlocal steps
        steps += 1
        return subject.loss(model)

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    backward = probe_backward(loss, trained, list(model.buffers()), everyone)
    return backward, {
        "modules": len(modules),
        "gathers": gather.calls / steps,
        "gathered": gather.nbytes / steps,
        "reductions": reduce.calls / steps,
        "reduced": reduce.nbytes / steps,
        "itemsize": gather.itemsize if gather.itemsize > 1 else 2,  # several dtypes travel as bytes
    }


def _sharers(p: Any, island: int) -> dict[str, Any]:
    """Return who holds this DTensor together, how often, and their links, for `Script`; a collective."""
    groups: dict[bool, Group] = {place.is_shard(): p.device_mesh.get_group(i) for i, place in enumerate(p.placements)}
    shard, replicas = groups[True], groups.get(False)
    hosts = {rank // island for rank in dist.get_process_group_ranks(shard)}
    found: dict[str, Any] = {"shards": shard.size(), "crossing": len(hosts) > 1}
    if replicas is None:
        return found
    near, between = (probe_links(group, p.device, seconds=2.0).links for group in (shard, replicas))
    return found | {"near": near["all_gather"], "between": between["all_reduce"], "replicas": replicas.size()}


def _held(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes of the whole model, its gradients and its optimizer's state: AdamW's if there is none."""
    parameters = list(model.parameters())
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    states = [x for each in optimizers for state in each.state.values() for x in state.values()]
    state = sum(x.numel() * x.element_size() for x in states if isinstance(x, Tensor)) if states else 2 * trained
    return sum(p.numel() * p.element_size() for p in parameters) + trained + state


def _room(device: torch.device, everyone: Group) -> int:
    """Return the bytes of memory that a rank has; ranks of a host without a GPU share its memory."""
    every = hosts(everyone, device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // every.count(every[everyone.rank()])


_VIRTUAL = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel")
_OFF = {
    "NCCL_P2P_DISABLE": "GPUs of this host then copy through its memory",
    "NCCL_SHM_DISABLE": "ranks of this host then talk through the network",
}


def complaints(environment: Mapping[str, str], system: Path = Path("/sys/class")) -> list[str]:
    """Return what in the environment slows the network down, in sentences. system: where Linux lists its devices."""
    return [*_interfaces(environment, system / "net"), *_switched_off(environment, system / "infiniband")]


def _interfaces(environment: Mapping[str, str], devices: Path) -> Iterator[str]:
    speeds = {each.name: _speed(each) for each in sorted(devices.glob("*")) if (each / "device").exists()}
    best = max(speeds, key=lambda name: speeds[name], default="")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        name = environment.get(variable, "").lstrip("=").partition(",")[0]
        if name.startswith(_VIRTUAL):
            yield f"{variable}={name} names no network card: set it to what `ip route get <the other host>` prints."
        elif name in speeds and speeds[name] < speeds[best]:
            yield (
                f"{variable}={name} is a card of {_rate(speeds[name])}, and {best} is one of {_rate(speeds[best])}: if "
                f"it reaches the other hosts, set {variable}={best}."
            )


def _switched_off(environment: Mapping[str, str], adapters: Path) -> Iterator[str]:
    found = ", ".join(each.name for each in sorted(adapters.glob("*")))
    if found and (environment.get("NCCL_IB_DISABLE") == "1" or environment.get("NCCL_NET") == "Socket"):
        variable = "NCCL_IB_DISABLE" if environment.get("NCCL_IB_DISABLE") == "1" else "NCCL_NET"
        yield f"{variable} keeps NCCL off this host's InfiniBand ({found}): unset it if the port is cabled."
    for variable, effect in _OFF.items():
        if environment.get(variable) == "1":
            yield f"{variable}=1 is set, and {effect}: unset it unless something hangs without."


def _speed(device: Path) -> int:
    """Return Mbit/s, 0 if the card does not say."""
    try:
        return max(0, int((device / "speed").read_text()))
    except (OSError, ValueError):
        return 0


def _rate(speed: int) -> str:
    return f"{speed / 1000:g} Gbit/s" if speed else "unknown speed"


_SUBJECTS: Mapping[str, Callable[..., Subject]] = MappingProxyType({"bench": of_bench, "user": of_user})


def measure(job: dict[str, Any], emit: Emit) -> None:
    """Measure what `job` names. Emit the "profile", the same on all ranks, and its "budget", or why it is "refused"."""
    try:
        found, budget = _measured(job)
        emit({"profile": found.to_json(), "budget": asdict(budget)})
    except BadInput as error:
        emit({"refused": str(error)})


def _measured(job: dict[str, Any]) -> tuple[Profile, Budget]:
    subject = _SUBJECTS[job["kind"]](**job["subject"])
    if not any(p.requires_grad for p in subject.module.parameters()):
        raise BadInput(f"{subject.description}: no parameter takes a gradient, so there is nothing to exchange")
    if is_fsdp1(subject.module):
        raise BadInput(f"{subject.description}: {FSDP1}")
    if not dist.is_initialized():  # the user's code may have chosen a backend
        join_group()
    budget = _budget(Budget(**job["budget"]), subject, named=job["named"])
    found = (explained if job["explain"] else _planned)(subject, budget)
    return replace(found, made={**found.made, "model": subject.description}), budget


def _planned(subject: Subject, budget: Budget) -> Profile:
    """Measure a subject in DDP; a collective. Raises BadInput for a sharded one."""
    if sharded_modules(subject.module):
        raise BadInput(
            f"{subject.description}: fully_shard has sharded it, and a plan is for whole replicas: add --explain, "
            "which says what takes the time and what to change"
        )
    model = wrapped(subject.module)
    return profile(model, lambda: subject.loss(model), update=subject.update, budget=budget)


def _budget(given: Budget, subject: Subject, *, named: bool) -> Budget:
    """Return the budget for the subject's own optimizer, if the user named none. `named`: whether candidates were."""
    if given.optimizer is not None:
        return given
    if named:
        return replace(given, optimizer=family(subject.optimizers))
    return budget_for(given, subject.optimizers, [p for p in subject.module.parameters() if p.requires_grad])
