"""What a worker that takes outer steps saves: an attachment's state, with what all workers have alike beside it.

Fragments hold different parameters, so all their residuals fit into one attachment's memories. One more follows
them: by parameter, the global one, the mean that has arrived and is not applied yet, and the outer optimizer's tensors.
Their fields are common to all workers, which `redistribute` copies where it adds up residuals.
"""

import json
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.integrations.membership.redistribution import COMMON
from thinwire.integrations.membership.state import Standing, check_finite, renamed, stranger
from thinwire.integrations.momentum.handover import unsigned
from thinwire.integrations.workers.fragments import Fragment
from thinwire.outer_steps import OuterSteps, check_settings

_GLOBAL, _MEAN, _STATE = f"{COMMON}global", f"{COMMON}mean", f"{COMMON}optimizer "
_PLAIN = f"{COMMON}plain "  # of the outer optimizer's state, as JSON
_RUNNING = f"{COMMON}running "  # statistics: they are held by the first parameter, and are no field of it


def dump(fragments: Sequence[Fragment], ticks: int, running: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return copies of everything that outlives an inner step, and these running statistics. Nothing is under way."""
    states = [fragment.attachment.state_dict() for fragment in fragments]
    memories = [dict(ChainMap(*parts)) for parts in zip(*(each["memories"] for each in states), strict=True)]
    common = {name: fields for fragment in fragments for name, fields in _common(fragment).items()}
    next(iter(common.values())).update({f"{_RUNNING}{name}": x for name, x in running.items()})
    held = sorted({field for fields in common.values() for field in fields})
    return states[0] | {
        "step": ticks,
        "draw": ticks,
        "fields": [*states[0]["fields"], held],
        "memories": [*memories, common],
        "outer": [plain(fragment.optimizer) for fragment in fragments],
    }


def check(saved: Mapping[str, Any], fragments: Sequence[Fragment], steps: OuterSteps) -> Standing:
    """Return where `saved` stands. Raises ValueError unless `dump` made it for such fragments."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("outer"), list) or not saved.get("memories"):
        raise ValueError(
            "this is not a state of outer steps; expected what the state_dict() of thinwire.outer returned"
        )
    if len(saved["outer"]) != len(fragments):
        raise ValueError(
            f"the state has {len(saved['outer'])} fragments, but this handle has {len(fragments)}: use the same "
            "fragments"
        )
    wanted = {name for fragment in fragments for name in fragment.parameters}
    saved = renamed(saved, wanted)
    for memory in saved["memories"]:
        if unknown := sorted(map(str, memory.keys() - wanted)):
            raise stranger(unknown[0], sorted(wanted))
    own = saved.get("own")
    if not isinstance(own, Sequence) or [type(count) for count in own] != [int, int]:
        raise ValueError(
            f"'own' in the state, this worker's inner steps, is {own!r:.200}; expected two counts, and all else that "
            "the state_dict() returned"
        )
    for number, (fragment, settings) in enumerate(zip(fragments, saved["outer"], strict=True)):
        standing = fragment.attachment.check_state_dict(_part(saved, fragment))
        flies = any(number in steps.parts_due(standing.step - tick) for tick in range(steps.delay))
        _check_common(saved["memories"][-1], fragment, flies=flies)
        check_settings(settings, fragment.optimizer)
    return standing


def of_a_group(count: int) -> str:
    """Return why what so many workers of a process group have saved is not loaded by one with a store."""
    return (
        f"this was saved by a process group of {count} workers, and with store= each loads what it has saved itself: "
        "load it without store=, or give the model alone its parameters"
    )


def load(saved: Mapping[str, Any], fragments: Sequence[Fragment], steps: OuterSteps, *, joining: bool = False) -> int:
    """Load what `check` has found to fit. Return the ticks done. A collective, unless this worker is `joining`.

    It then takes over another worker's state, `without_residuals`, where all of them are.
    """
    saved = renamed(saved, [name for fragment in fragments for name in fragment.parameters])
    ticks, common = int(saved["step"]), saved["memories"][-1]
    for number, (fragment, settings) in enumerate(zip(fragments, saved["outer"], strict=True)):
        done, attachment = steps.done(number, ticks), fragment.attachment
        go_on_from = attachment.membership.join if joining else attachment.load_state_dict
        go_on_from(_part(saved, fragment) | {"step": done, "draw": done})
        for name, p in fragment.parameters.items():
            p.detach().copy_(common[name][_GLOBAL])
        fragment.take_means({n: common[n][_MEAN] for n in fragment.parameters if _MEAN in common[n]})
        _load_optimizer(fragment, common, settings)
        fragment.finished = done
    return ticks


def global_parameters(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """Return the global parameters of these names in what `check` has found to fit."""
    common = renamed(saved, names)["memories"][-1]
    return {name: common[name][_GLOBAL] for name in names}


def running(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the running statistics that `dump` was given; older states have none."""
    fields = (pair for fields in saved["memories"][-1].values() for pair in fields.items())
    return {field.removeprefix(_RUNNING): x for field, x in fields if field.startswith(_RUNNING)}


def _common(fragment: Fragment) -> dict[str, dict[str, Tensor]]:
    """Return copies of what all workers have alike."""
    means, state = fragment.means(), fragment.optimizer.state
    found = {}
    for name, p in fragment.parameters.items():
        held = dict(_field(key, x) for key, x in state.get(p, {}).items())
        mean = {_MEAN: means[name]} if name in means else {}
        found[name] = {f: x.detach().clone() for f, x in ({_GLOBAL: p} | mean | held).items()}
    return found


def _field(key: str, value: object) -> tuple[str, Tensor]:
    """Return what to save of an outer optimizer's state. Raises TypeError for what no tensor can hold."""
    if isinstance(value, Tensor):
        return f"{_STATE}{key}", value
    try:
        text = json.dumps(value).encode()
    except TypeError:
        raise TypeError(
            f"the outer optimizer keeps {key!r} as {value!r:.100}; expected tensors, or what JSON can carry, to save it"
        ) from None
    return f"{_PLAIN}{key}", torch.frombuffer(bytearray(text), dtype=torch.uint8)


def plain(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of the optimizer's groups, such as its learning rate, as plain values."""
    return [
        {key: x.item() if isinstance(x, Tensor) else x for key, x in unsigned(group).items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _load_optimizer(
    fragment: Fragment, common: Mapping[str, Mapping[str, Tensor]], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Give the outer optimizer its tensors and settings, by way of its own `load_state_dict`."""
    optimizer, names = fragment.optimizer, fragment.attachment.names
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    held = [
        dict(_kept(field, x) for field, x in common[name].items() if field.startswith((_STATE, _PLAIN)))
        for name in order
    ]
    pairs = zip(optimizer.state_dict()["param_groups"], settings, strict=True)
    groups = [mine | {key: _like(mine.get(key), value) for key, value in theirs.items()} for mine, theirs in pairs]
    optimizer.load_state_dict({"state": {i: each for i, each in enumerate(held) if each}, "param_groups": groups})
    for name, each in zip(order, held, strict=True):
        state = optimizer.state.get(fragment.parameters[name], {})
        for key in state.keys() & each.keys():
            if isinstance(x := each[key], Tensor) and not x.dim():  # torch has made it one of the parameter's dtype
                state[key] = x.to(state[key].device)


def _like(mine: object, value: Any) -> Any:
    """Return a setting as a tensor if this optimizer has one there: others round otherwise."""
    return torch.as_tensor(value, dtype=mine.dtype, device=mine.device) if isinstance(mine, Tensor) else value


def _kept(field: str, x: Tensor) -> tuple[str, Any]:
    """Return what `_field` has made this field of."""
    if field.startswith(_PLAIN):
        return field.removeprefix(_PLAIN), json.loads(x.cpu().numpy().tobytes())
    return field.removeprefix(_STATE), x.clone()


def _part(saved: Mapping[str, Any], fragment: Fragment) -> dict[str, Any]:
    """Return what the attachment of this fragment would have saved."""
    *memories, _ = saved["memories"]
    mine = [{name: fields for name, fields in each.items() if name in fragment.parameters} for each in memories]
    return {**saved, "memories": mine, "fields": saved.get("fields", [])[:-1]}


def _check_common(common: Mapping[str, Mapping[str, Tensor]], fragment: Fragment, *, flies: bool) -> None:
    """Raise ValueError unless this fits a fragment; `flies`: its exchange may be under way at that step."""
    own = fragment.own()
    means = [name for name in fragment.parameters if _MEAN in common.get(name, {})]
    if means and not (flies and len(means) == len(fragment.parameters)):
        raise ValueError(
            f"the state has a mean under way for {means[0]!r}, which other outer steps exchange at other ticks and "
            "would lose: use the every, delay and fragments with which it was saved, or save at another step"
        )
    for name, p in fragment.parameters.items():
        fields = common.get(name, {})
        if _GLOBAL not in fields:
            raise ValueError(f"the state lacks {name!r}: it was saved from another model")
        if not all(isinstance(x, Tensor) and not x.is_meta for x in fields.values()):
            raise ValueError(f"the state has {fields!r:.200} for {name!r}; expected tensors with values")
        for field, x in fields.items():
            fits = x.shape == p.shape and x.dtype in (p.dtype, own[name].dtype)  # the latter: as once saved
            if field in (_GLOBAL, _MEAN) and not fits:
                raise ValueError(
                    f"{field.removeprefix(COMMON)} of {name!r} has shape {tuple(x.shape)} and {x.dtype}; expected "
                    f"{tuple(p.shape)} and {p.dtype}: it was saved from another model"
                )
            check_finite(x if x.itemsize > 1 else x.float(), f"{field.removeprefix(COMMON)} of {name!r}")
