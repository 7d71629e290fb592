"""Putting boundaries between the stages of a split model. Hooks do it, so modules and parameters keep their names."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as untraced
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire import trace
from thinwire.checked import BODY, Share, Size, Whole, checked
from thinwire.errors import PayloadError
from thinwire.handle import Handle, MemoryUse
from thinwire.payloads import Narrow
from thinwire.pipeline.boundary import Boundary, Report, TopKBoundary
from thinwire.trace import Meter, Stats


class Stage(Protocol):
    """What we need of a `torch.distributed.pipelining.PipelineStage`."""

    submod: nn.Module
    stage_index: int
    num_stages: int


Make: TypeAlias = Callable[[], Boundary]
PREFIX = "boundary_"
"""Prefix of the buffers in which a stage keeps its boundary's state. nn.Sequential would run a submodule."""


@final
@checked
@dataclass(frozen=True)
class Sparsified(Handle):
    """The boundaries behind this rank's stages, by the index of the stage that sends.

    A handle, which `sparsify` returns.
    """

    boundaries: Mapping[Size, Boundary]
    _senders: Mapping[Size, nn.Module]
    _hooks: Sequence[RemovableHandle]
    _meter: Meter

    @property
    def memory(self) -> MemoryUse:
        """State of the boundaries behind this rank's stages. Messages are activations, so there is no staging."""
        return MemoryUse(sum(x.nbytes for held in self._buffers().values() for x in held.values()), staging=0)

    def stats(self) -> Stats:
        """Return what this rank sent and packed since the last call, as `step`, and in total. Call it once a step.

        Forward activations and backward gradients count. The pipeline's schedule sends them, so `exchange_ms` is NaN,
        and so is `residual_ratio`, as there is no residual. On a GPU the call makes the host wait.
        """
        stats = self._meter.stats()
        self._meter.end()
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return what the boundaries keep, by stage and name. The stages' own state_dict has it too."""
        return {str(i): {name: buffer.clone() for name, buffer in held.items()} for i, held in self._buffers().items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from `state_dict`.

        Raises:
            ValueError: If it was saved from other boundaries. Nothing is changed then.
        """
        mine = {str(i): held for i, held in self._buffers().items()}
        if _shapes(saved) != _shapes(mine):
            raise ValueError(
                f"got the state of boundaries {_shapes(saved)}; expected {_shapes(mine)}: use the same boundaries"
            )
        for index, held in mine.items():
            for name, buffer in held.items():
                buffer.copy_(saved[index][name])

    def reports(self) -> dict[int, Report]:
        """Return the report of each boundary since the last call, by the index of its stage."""
        return {index: boundary.report() for index, boundary in self.boundaries.items()}

    def remove(self) -> None:
        """Detach: new PipelineStages of the modules send activations in full again, and can be sparsified again."""
        for hook in self._hooks:
            hook.remove()
        for module in self._senders.values():
            for name in [name for name in module._buffers if name.startswith(PREFIX)]:
                del module._buffers[name]  # delattr would look in the module that a compiled one wraps

    def _buffers(self) -> dict[int, dict[str, Tensor]]:
        """Return what each boundary keeps. It lives in the modules, and is saved with them."""
        return {
            i: {n: x for n, x in module._buffers.items() if n.startswith(PREFIX) and x is not None}
            for i, module in self._senders.items()
        }


@checked
def sparsify(
    stages: Annotated[Sequence[nn.Module] | Sequence[Stage], BODY],
    density: Share | None = None,
    *,
    values: Narrow = None,
    start_dim: Whole = -1,
    boundary: Make | None = None,
) -> Sparsified:
    """Put a boundary behind every stage but the last (DCT-MP, Gupta et al. 2021).

    Every floating-point tensor that a stage returns is sparsified; others travel unchanged. A module may already be
    wrapped in DistributedDataParallel.

    Args:
        stages: The modules of the whole split model, in order, or this rank's PipelineStages before their first step,
            made without example arguments, because what is sent has a different shape from the activation.
        density: As in `TopKBoundary`.
        values: As in `TopKBoundary`.
        start_dim: As in `TopKBoundary`.
        boundary: A function that returns the boundary to use; give it instead of `density`.

    Returns:
        The handle, with the boundaries behind this rank's stages.

    Raises:
        ValueError: If stages are of neither kind, already have a boundary, or were made with example arguments; if
            `boundary()` returns one twice; or unless exactly one of `density` and `boundary` is given.
        TypeError: Where `boundary()` returns no Boundary.

    Example:
        >>> stages = [nn.Linear(64, 64), nn.Linear(64, 8)]
        >>> handle = tw.pipeline.sparsify(stages, density=0.05)
        >>> handle.boundaries
        {0: TopKBoundary()}
    """
    make, (modules, last) = _maker(density, values, start_dim, boundary), _modules(stages)
    if len({*modules.values()}) < len(modules):
        raise ValueError("a module occurs twice among the stages; expected each once")
    for module in modules.values():
        hooks_of = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(getattr(hook, "func", None) in (_send, _receive) for hook in hooks_of):
            raise ValueError(f"{type(module).__name__} is sparsified already; remove() that first")
    made = {index: make() for index in modules}
    if wrong := [type(each).__name__ for each in made.values() if not isinstance(each, Boundary)]:
        raise TypeError(f"boundary= made a {wrong[0]}; expected a function that makes a Boundary")
    if len({*made.values()}) < len(made):  # thresholds of several stages would mix
        raise ValueError("boundary= made the same boundary twice; expected a function that makes a new one each time")
    hooks = [hook for i, module in modules.items() for hook in _hooked(module, made[i], first=i == 0, last=i == last)]
    senders = {i: module for i, module in modules.items() if i != last}
    meter = Meter()
    for each in made.values():
        each.listeners = (meter,)
    return Sparsified({index: made[index] for index in senders}, senders, tuple(hooks), meter)


def _hooked(module: nn.Module, boundary: Boundary, *, first: bool, last: bool) -> Iterator[RemovableHandle]:
    """Put a boundary before and behind a module. The one before it only receives, which takes no state."""
    if not first:
        # First of all hooks: FSDP2's would cast words, and those of users want activations.
        yield module.register_forward_pre_hook(partial(_receive, boundary), prepend=True)
    if not last:
        for name, buffer in boundary.named_buffers():
            module.register_buffer(PREFIX + name, buffer)
        yield module.register_forward_hook(partial(_send, boundary))


def _maker(density: float | None, values: Narrow, start_dim: int, boundary: Make | None) -> Make:
    if (density is None) == (boundary is None):
        raise ValueError("expected either a density or boundary=, a function that makes a Boundary")
    if isinstance(boundary, Boundary):
        raise TypeError(
            f"boundary is a {type(boundary).__name__}; expected a function that makes one, a new one each time"
        )
    if boundary is not None:
        if values is not None or start_dim != -1:
            raise ValueError("values and start_dim belong to the boundary that boundary= makes")
        return boundary
    assert density is not None  # for the type checker
    return partial(TopKBoundary, density, values=values, start_dim=start_dim)


def _modules(stages: Sequence[nn.Module] | Sequence[Stage]) -> tuple[dict[int, nn.Module], int]:
    """Return the modules by the index of their stage, and the index of the last stage. Raises ValueError."""
    if not isinstance(stages, Sequence) or isinstance(stages, str) or not stages:
        raise ValueError(f"got {type(stages).__name__}; expected a list of the stages' modules, or of PipelineStages")
    modules = [stage for stage in stages if isinstance(stage, nn.Module)]
    others = [stage for stage in stages if not isinstance(stage, nn.Module)]
    if (modules and others) or not all(hasattr(stage, "submod") for stage in others):
        kinds = ", ".join(type(stage).__name__ for stage in stages)
        raise ValueError(f"stages are {kinds}; expected the modules of the whole split model, or PipelineStages")
    for stage in others:
        told = getattr(getattr(stage, "_user_meta", stage), "inputs", None) or getattr(stage, "inputs_meta", None)
        if told or hasattr(stage, "pipe_info"):
            raise ValueError(
                f"stage {stage.stage_index} has the shapes of dense activations, from example arguments or tracing; "
                "make it from the module alone: PipelineStage(module, index, num_stages, device)"
            )
    found = {stage.stage_index: stage.submod for stage in others} or dict(enumerate(modules))
    bare = {i: each.module if isinstance(each, DistributedDataParallel) else each for i, each in found.items()}
    return bare, (others[0].num_stages if others else len(modules)) - 1


@untraced
def _send(
    boundary: Boundary, module: nn.Module, args: tuple[Any, ...], output: Tensor | Sequence[Tensor]
) -> tuple[Tensor, ...]:
    boundary.train(module.training)
    for name in boundary._buffers:  # the module's may have moved to another device
        boundary._buffers[name] = module._buffers[PREFIX + name]
    outputs = (output,) if isinstance(output, Tensor) else output
    if not isinstance(outputs, Sequence) or not all(isinstance(x, Tensor) for x in outputs):
        raise TypeError(f"{type(module).__name__} returned {type(output).__name__}; expected a tensor or several")
    return tuple(part for x in outputs for part in (_sent(boundary, x) if x.is_floating_point() else (x,)))


@untraced
def _receive(boundary: Boundary, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not all(isinstance(x, Tensor) for x in args):
        given = ", ".join(type(x).__name__ for x in args)
        raise TypeError(f"{type(module).__name__} got {given}; expected tensors: stage(*what the one before returned)")
    parts = iter(args)
    return tuple(boundary.receive(*_framed(boundary, x, parts)) if x.is_floating_point() else x for x in parts)


def _framed(boundary: Boundary, words: Tensor, parts: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    frame = next(parts, None)
    if frame is None or not frame.shape or frame.shape[-1]:
        raise PayloadError("a stage got a plain activation; expected what a boundary sends: sparsify all stages alike")
    if words.dtype != torch.float32:
        raise PayloadError(
            f"a stage got words cast to {words.dtype}: where fully_shard has an mp_policy, call sparsify after it"
        )
    if words.requires_grad:  # as many words go back with the gradient
        _count(boundary, words, math.prod(frame.shape[:-1]) * frame.itemsize)
    return words, frame


def _sent(boundary: Boundary, x: Tensor) -> tuple[Tensor, Tensor]:
    words, frame = boundary.send(x)
    _count(boundary, words, x.nbytes)
    return words, frame


def _count(boundary: Boundary, words: Tensor, dense: int) -> None:
    trace.count("sent_bytes", words.nbytes, *boundary.listeners)
    for listener in boundary.listeners:
        listener.add("dense_bytes", dense)


def _shapes(state: object) -> dict[str, dict[str, object]]:
    given = state.items() if isinstance(state, Mapping) else ()
    held = {index: buffers for index, buffers in given if isinstance(buffers, Mapping)}
    return {index: {name: _shape(x) for name, x in buffers.items()} for index, buffers in held.items()}


def _shape(x: object) -> object:
    return tuple(x.shape) if isinstance(x, Tensor) else type(x)
