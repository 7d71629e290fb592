"""Putting an attachment together from a recipe and parameters, once all ranks agree on them."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives import Group
from thinwire.errors import FingerprintError, MomentumError
from thinwire.integrations.attachments.attachment import Attachment, LossScaler
from thinwire.integrations.membership.membership import Divisor, agreed
from thinwire.integrations.membership.state import words
from thinwire.integrations.momentum.correction import Correction, corrections
from thinwire.integrations.momentum.fading import Fading, fading
from thinwire.integrations.momentum.handover import Handover
from thinwire.integrations.training.drift import check_alike
from thinwire.integrations.training.gradients import segment_of
from thinwire.planner import Why
from thinwire.reducer import Reducer, Released
from thinwire.version import __version__
from thinwire.waits import on_host

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
_SAMPLE = 1 << 12


def assembled(
    groups: Sequence[Group],
    recipe: Reducer,
    parameters: dict[str, nn.Parameter],
    *,
    settings: str,
    optimizers: Sequence[torch.optim.Optimizer],
    sparse: Collection[Tensor] = frozenset(),
    scaler: LossScaler | None = None,
    divisor: Divisor | None = None,
    may_be_unused: bool = False,
    everything: Callable[[], Mapping[str, Tensor]] | None = None,
    why: Callable[[], Why] | None = None,
) -> Attachment:
    """Return the attachment of a recipe to these parameters, on every rank of the mesh or on none; a collective.

    `groups`: those of the mesh, that which exchanges first. `sparse`: the parameters with sparse gradients. `divisor`:
    by default the number of ranks. Takes over an earlier one's residuals: call `check_takeover` first.
    """
    group, size = groups[0], groups[0].size()

    def work() -> Attachment:
        earlier = _earlier(parameters)
        since = f"an earlier attachment {'absent' if earlier is None else f'of {earlier.step} steps'}"
        check_fingerprint(recipe, parameters, group, f"{described(optimizers)}, {settings}, {since}")
        if everything is not None:  # otherwise these are a part of a model
            check_names(recipe, everything())
        kinds_of_tensor = {(p.dtype, p.device) for p in parameters.values()}
        recipe.prepare(group, [torch.ones(_SAMPLE, dtype=dtype, device=device) for dtype, device in kinds_of_tensor])
        names = {p: name for name, p in parameters.items() if p not in sparse}
        attachment = Attachment(
            recipe,
            parameters,
            groups,
            handover=_handover(recipe, optimizers, names, group),
            divisor=divisor or (lambda joined, steps: size),
            scaler=scaler,
            may_be_unused=may_be_unused,
            everything=everything,
            why=why,
        )
        if earlier is not None:
            outdated = earlier.outdated
            attachment.membership.take_over(earlier.membership)
            attachment.steps.fresh = not outdated
        attachment.steps.know(optimizers)
        for each in optimizers if why is None else ():  # a plan may yet decide that nothing waits
            attachment.advice.attached(each)
        return attachment

    attachment = agreed(groups, work, FingerprintError, MomentumError, RuntimeError, undo=Attachment.end)
    for each in _replaced(parameters):
        each.end()
    _serving.update({id(memory): attachment for memory in attachment.recipe.memories() if memory.stateful})
    for other in _serving_any(parameters):
        attachment.sharing.add(other)
        other.sharing.add(attachment)
    _alive.add(attachment)
    return attachment


@contextmanager
def opening(attachment: Attachment) -> Iterator[None]:
    """Within, whatever is raised ends the attachment, so that nothing stays of what has failed."""
    try:
        yield
    except BaseException:
        attachment.end()
        raise


def check_recipe(recipe: object, verb: str) -> None:
    """Raise TypeError for anything but a recipe, and what `check_free` does."""
    if not isinstance(recipe, Reducer):
        raise TypeError(
            f"{verb} takes a recipe such as recipes.topk(density=0.01); got {recipe!r:.60}. Plans are made for DDP's "
            "buckets, so choose a recipe by name"
        )
    check_free(recipe)


def check_free(recipe: Reducer) -> None:
    """Raise RuntimeError if the recipe's memories already hold something."""
    if any(id(memory) in _serving or memory.state() for memory in recipe.memories()):
        raise RuntimeError("this recipe is attached to a model already: make a new recipe for each model")


def check_names(recipe: Reducer, known: Collection[str]) -> None:
    """Raise ValueError if the recipe names a parameter that the model lacks, frozen ones included."""
    if unknown := sorted(recipe.chosen_for - set(known)):
        near = get_close_matches(unknown[0], known) or [*known][:3]
        raise ValueError(
            f"PerTensor.chosen names {unknown[0]!r}, which the model lacks; expected names of its named_parameters(), "
            f"such as {', '.join(near)}"
        )


def check_real(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise TypeError for a complex parameter."""
    if complex_ := [name for name, p in parameters.items() if p.is_complex()]:
        raise TypeError(f"{complex_[0]} is complex; keep it as torch.view_as_real")


def check_fingerprint(recipe: Reducer, parameters: dict[str, nn.Parameter], group: Group, settings: str = "") -> None:
    """Raise FingerprintError, on every rank, if recipe, parameters or settings differ; a collective."""
    mine = {
        "thinwire": __version__,
        "recipe": words(recipe),
        "what the wrapper, the gathers or the optimizer is set to": settings,
    }
    for name, p in parameters.items():
        by_library = recipe.route(segment_of(p, name)).by_library and not on_host(p)  # its bits hang on the GPU
        computed = f", which {gpu_of(p.device)} computes" if by_library else ""
        mine[f"parameter {name}"] = f"{tuple(p.shape)} {p.dtype}{computed}"
    check_alike(mine, group)


def gpu_of(device: torch.device) -> str:
    """Return a GPU's model; of another kind of device, the kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _handover(
    recipe: Reducer, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str], group: Group
) -> Handover:
    memories = recipe.memories()
    if not fading(memories):
        return Correction(memories, optimizers, names)
    if corrections(memories):
        raise MomentumError("this recipe mixes momentum correction and fading momentum: use one of the two throughout")
    return Fading(recipe, optimizers, names, group)


# Which attachment a memory serves, by the memory's id.
_serving: weakref.WeakValueDictionary[int, Attachment] = weakref.WeakValueDictionary()
_alive: weakref.WeakSet[Attachment] = weakref.WeakSet()


def _replaced(parameters: Mapping[str, nn.Parameter]) -> list[Attachment]:
    """Return what has served these parameters until now; what also serves others in training stays at work."""
    mine = set(parameters.values())
    return [
        each
        for each in _serving_any(parameters)
        if mine.issuperset(p for p in each.parameters.values() if p.requires_grad)
    ]


def _earlier(parameters: Mapping[str, nn.Parameter]) -> Attachment | None:
    """Return which to take over from; RuntimeError if several have residuals or momentum."""
    found = _replaced(parameters)
    waiting = [each for each in found if each.waits or each.membership.handover.active]
    if len(waiting) > 1:
        raise RuntimeError(
            f"these parameters have {len(found)} earlier attachments, and residuals can be taken over from only one: "
            "call remove() on the others, and train a step"
        )
    return next(iter(waiting or found), None)


def _serving_any(parameters: Mapping[str, nn.Parameter]) -> list[Attachment]:
    mine = set(parameters.values())
    return [each for each in _alive if not each.ended and not mine.isdisjoint(each.parameters.values())]


def check_takeover(recipe: Reducer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise RuntimeError if these parameters have residuals that this recipe cannot keep.

    Raises MomentumError if another attachment stays at work on some of them, and one of the two moves momentum.
    """
    earlier = _earlier(parameters)
    others = [e for e in _serving_any(parameters) if e is not earlier and not isinstance(e.recipe, Released)]
    moves = bool(fading(recipe.memories()) or corrections(recipe.memories()))
    if any(moves or each.membership.handover.active for each in others):
        shared = next(name for name, p in parameters.items() if any(p in each.names for each in others))
        raise MomentumError(
            f"{shared} is in another attached model too, and its momentum can move into only one memory: wrap both "
            "models as one and attach that, call remove() on the other attachment, or give both a recipe that leaves "
            "momentum to the optimizer, such as recipes.topk"
        )
    if earlier is not None and earlier.waits and not earlier.membership.keeps_like(recipe, parameters):
        raise RuntimeError(
            "an earlier attachment to this model has residuals that this recipe's memory cannot hold: call remove() on "
            "the earlier one and train a step, or attach the same kind of recipe"
        )


def check_whole(parameters: Mapping[str, nn.Parameter], verb: str) -> None:
    """Raise RuntimeError if an earlier attachment serves some of these and others in training: FSDP reduces for one."""
    mine = set(parameters.values())
    held = {name: p for each in _serving_any(parameters) for name, p in each.parameters.items()}
    if others := [name for name, p in held.items() if p.requires_grad and p not in mine]:
        raise RuntimeError(
            f"an earlier handle exchanges the gradients of these parameters and {len(others)} others, such as "
            f"{others[0]}: call {verb} with the whole model, which takes over from it; for recipes by parameter, pass "
            "thinwire.reducer.PerTensor"
        )


def listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list. Raises TypeError for anything else."""
    listed: list[Any] = [] if optimizer is None else [optimizer]
    if len(listed) == 1 and not isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, Iterable):
        listed = list(optimizer)
    for each in listed:
        if isinstance(each, torch.optim.Optimizer) and hasattr(each, "_optimizer_step_pre_hooks"):
            continue
        held = getattr(each, "__dict__", {}).items()  # those that wrap another one have no hooks
        inner = next((name for name, x in held if isinstance(x, torch.optim.Optimizer)), None)
        got = f"{each!r:.100}" if inner is None else f"a {type(each).__name__} around one: give the inner one, .{inner}"
        raise TypeError(f"optimizer takes a torch.optim.Optimizer or several of them; got {got}")
    return listed


def described(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return in words the optimizers' settings that must agree on all ranks."""
    keys = ("momentum", "nesterov", "dampening", "weight_decay", "maximize")
    groups = [
        {k: g[k] for k in keys if k in g} | ({"betas": [float(b) for b in g["betas"]]} if "betas" in g else {})
        for each in optimizers
        for g in each.param_groups
    ]
    return f"optimizer groups {groups}"
