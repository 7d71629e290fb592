"""The parameters that a model has trained, who has them in this process, and which server gets which."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final
from weakref import WeakValueDictionary

import torch
from torch import nn

from thinwire.integrations.membership.state import uncompiled
from thinwire.integrations.replicas.asked import sparse_weights
from thinwire.integrations.sharding.fsdp import refuse_sharded

_claimed = WeakValueDictionary[int, object]()
"""What of this process is served or trained, by id."""


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter: its name, shape and dtype, and whether its gradient comes as rows of a sparse embedding."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: bool

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}{', in rows' if self.rows else ''}"


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, without the prefix that torch.compile puts before names."""
    return {uncompiled(name): p for name, p in model.named_parameters()}


def entries(model: nn.Module) -> list[Entry]:
    """Return the model's parameters that are trained. Raises ValueError if there are none it can send, or TypeError."""
    refuse_sharded(model, "a parameter server")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError("DistributedDataParallel reduces gradients itself; serve or connect its .module")
    sparse, own = sparse_weights(model), named(model)
    found = [
        Entry(name=name, shape=tuple(p.shape), dtype=p.dtype, rows=p in sparse)
        for name, p in own.items()
        if p.requires_grad
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no parameters that require gradients")
    at = {name: p.data_ptr() for name, p in own.items()}  # 0 without elements
    last = {place: name for name, place in at.items()}
    if tied := next((name for name, place in at.items() if place and last[place] != name), None):
        raise ValueError(
            f"{tied} and {last[at[tied]]} lie in one memory, and would be trained apart: make them one Parameter, as "
            "in head.weight = embedding.weight"
        )
    places = {str(own[each.name].device): each.name for each in found if not each.rows}
    if len(places) > 1:
        words = " and ".join(f"{name} on {place}" for place, name in places.items())
        raise ValueError(f"{words}: expected one device for all parameters but sparse embeddings; move the model to it")
    if unreal := next((each for each in found if each.dtype.is_complex), None):
        raise ValueError(f"{unreal.name} is complex; keep it as torch.view_as_real")
    if empty := next((each for each in found if not each.numel), None):
        raise ValueError(f"{empty.name} is {empty.shape} and has no elements to send: freeze it")
    return found


def frozen(model: nn.Module) -> str:
    """Return a hash of the parameters that are not trained: nobody sends them, so all must have the same."""
    digest, found = hashlib.sha256(), [(name, p) for name, p in named(model).items() if not p.requires_grad]
    for name, p in found:
        digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
        digest.update(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16] if found else "none"


@contextmanager
def claimed(some: Sequence[tuple[str, object]], by: str) -> Iterator[None]:
    """Within, no other `claimed` of this process may have any of these, which are named. Raises ValueError."""
    if taken := next((name for name, each in some if id(each) in _claimed), None):
        raise ValueError(f"{taken} is in use by another {by}")
    mine = {id(each): each for _, each in some}
    _claimed.update(mine)
    try:
        yield
    finally:
        for each in mine:
            _claimed.pop(each, None)


def shards(parameters: Sequence[Entry], servers: int) -> list[list[Entry]]:
    """Divide parameters, at least one each, among servers: the largest first, to whichever has least so far."""
    if servers > len(parameters):
        raise ValueError(f"{servers} servers for {len(parameters)} parameters; expected at most one server a parameter")
    load, owner = [0] * servers, dict[str, int]()
    for each in sorted(parameters, key=lambda each: (-each.numel, each.name)):
        least = load.index(min(load))
        owner[each.name], load[least] = least, load[least] + max(1, each.numel)
    return [[each for each in parameters if owner[each.name] == i] for i in range(servers)]
