"""Replicas without DistributedDataParallel: they exchange gradients after the whole backward of a step.

Why not DDP? It needs each backward right after its forward, and a pipeline's schedule interleaves them.
"""

import weakref
from collections.abc import Iterable
from typing import Annotated, final

import torch
from torch import Tensor, futures, nn
from torch._compile import _disable_dynamo as untraced
from torch.nn.parallel import DistributedDataParallel

from thinwire.checked import BODY, checked
from thinwire.collectives import Group
from thinwire.integrations.attachments import assembly
from thinwire.integrations.attachments.assembly import Optimizers
from thinwire.integrations.attachments.attachment import Attached, Attachment, LossScaler
from thinwire.integrations.membership.membership import agreed, given_group, group_or_all, raise_on_all
from thinwire.integrations.replicas.asked import sparse_weights
from thinwire.integrations.sharding.fsdp import refuse_sharded
from thinwire.integrations.training.drift import check_shapes, refuse_meta, start_alike, state_of
from thinwire.integrations.training.gradients import buckets, used_anywhere
from thinwire.reducer import Reducer
from thinwire.waits import refuse_unfit


@final
class Replicas(Attached):
    """Replicas of one model, and a handle, which `replicate` returns; `attachment` does the work."""

    def __init__(self, whole: nn.Module, attachment: Attachment) -> None:
        weights = sparse_weights(whole)
        managed = list(attachment.parameters.values())
        self._attachment = attachment
        attachment.serve(whole)
        self._buckets = list(buckets([p for p in managed if p not in weights]))
        self._sparse = [p for p in managed if p in weights]
        self._handed: dict[str, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._frozen = [(name, p) for name, p in whole.named_parameters() if not p.requires_grad]

    @property
    def _copies(self) -> int:
        return sum(bucket.flat.nbytes for bucket in self._buckets)

    @untraced  # nor can Dynamo trace collectives, where a step is compiled
    def reduce(self) -> None:
        """Replace every gradient by its mean over the replicas, through the recipe; a collective.

        Call it once a step, after the last backward (in a pipeline, after `schedule.step`) and before the optimizer. A
        missing gradient counts as zeros; a parameter for which no replica has a gradient is left alone.

        Raises:
            RuntimeError: If a parameter with a gradient was frozen when the replicas were made, if a gradient is
                reduced a second time before any optimizer took it, within the capture of a CUDA graph, and in inference
                mode.
        """
        refuse_unfit("gradients are reduced")
        self.attachment.membership.agree()  # a rank that loads a state compares first, too
        error = None
        try:
            self._check()
        except Exception as raised:  # whatever it is, the other ranks must not wait for this one
            error = raised
        used = used_anywhere(list(self.attachment.parameters.values()), self.group, error)
        started = []
        for bucket in self._buckets:
            bucket.fill()
            started.append(self.attachment.reduce(bucket.flat, bucket.parameters))
        rows = [(p, self.attachment.reduce_sparse(_rows(p), [p])) for p in self._sparse]
        futures.wait_all(started)  # all, even if one fails: it stages what it delivers
        for bucket in self._buckets:
            bucket.hand_back(used)
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                if p.grad is not None:
                    self._handed[self.attachment.names[p]] = weakref.ref(p.grad), view
        for p, future in rows:
            mean = future.wait()
            p.grad = mean if p in used else None
        self.attachment.steps.drop_idle(used)

    def regroup(self, group: Group) -> None:
        """Continue with the ranks of another group: see `Membership.regroup`."""
        assembly.check_fingerprint(self.attachment.recipe, dict(self.attachment.parameters), group)
        self.attachment.membership.regroup(group)

    def _check(self) -> None:
        """Raise whatever there is to refuse on this rank alone."""
        if thawed := [name for name, p in self._frozen if p.grad is not None]:
            raise RuntimeError(f"{thawed[0]} was frozen when the replicas were made: call replicate again")
        for p in self._sparse:
            if p.grad is not None and not p.grad.is_sparse:
                raise RuntimeError(
                    f"the gradient of {self.attachment.names[p]!r} is dense, as where another layer shares the weight, "
                    "but its embedding has sparse=True: build the embedding without that"
                )
        self.attachment.check_loaded()  # which the forward pass of a pipeline's stage does not
        self._notice_replaced()

    def _notice_replaced(self) -> None:
        """Find gradients that were set without autograd. Zero-bubble schedules set those of weights that way."""
        steps = self.attachment.steps
        steps.close_if_done()
        steps.find_thrown_away()  # zeroed in place, and nothing has been added since
        for name, p in self.attachment.parameters.items():
            if p.grad is None or p.grad.is_sparse or name in steps.gradients.added:
                continue
            there, mean = self._handed.get(name, (lambda: None, p))
            if there() is p.grad and torch.equal(p.grad, mean):
                continue
            if name in steps.pending and there() is p.grad:
                raise RuntimeError(
                    f"the gradient of {name!r} has been reduced already, and no optimizer has taken it since: call "
                    "reduce() once a step, or zero_grad() after a skipped step"
                )
            steps.note_replaced(name)


@checked(on_error=raise_on_all(given_group))
def replicate(
    modules: nn.Module | Iterable[nn.Module],
    recipe: Annotated[Reducer, BODY],
    *,
    group: Group | None = None,
    optimizer: Optimizers = None,
    scaler: LossScaler | None = None,
) -> Replicas:
    """Make replicas of a module, or of this rank's stages of a pipeline; a collective.

    The group's first rank sends its parameters and buffers to all others; buffers are sent only once. From then on call
    `reduce()` in every step. Nothing overlaps with backward, and gradients take twice the memory.

    Args:
        modules: The module, or this rank's stages of a pipeline.
        recipe: As in `thinwire.attach`.
        group: The replicas; by default all ranks.
        optimizer: As in `thinwire.attach`.
        scaler: As in `thinwire.attach`.

    Returns:
        The handle, whose `reduce()` you call in every step.

    Raises:
        TypeError: For anything but a recipe, for complex parameters, for the meta device, and for
            DistributedDataParallel, which reduces gradients itself.
        RuntimeError: Where there is no process group; and whatever `thinwire.attach` raises.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> handle = tw.replicate(model, tw.recipes.topk(density=0.01))
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> handle.reduce()
    """
    everyone = group_or_all(group)
    whole, parameters, optimizers = agreed([everyone], lambda: _looked_at(modules, recipe, optimizer))
    check_shapes(whole, everyone)  # before it takes over an earlier attachment's residuals
    attachment = assembly.assembled(
        [everyone],
        recipe,
        parameters,
        settings="replicate",
        optimizers=optimizers,
        sparse=sparse_weights(whole),
        scaler=scaler,
        everything=lambda: dict(whole.named_parameters()),
    )
    with assembly.opening(attachment):
        start_alike(whole, everyone)
        return Replicas(whole, attachment)


def _looked_at(
    modules: nn.Module | Iterable[nn.Module], recipe: Reducer, optimizer: Optimizers
) -> tuple[nn.Module, dict[str, nn.Parameter], list[torch.optim.Optimizer]]:
    """Return modules as one, what they train, and optimizers. Raises what `replicate` does about this rank alone."""
    assembly.check_recipe(recipe, "replicate")
    every = [modules] if isinstance(modules, nn.Module) else list(modules)
    if not every:
        raise ValueError("modules is []; expected a module, or this rank's stages of a pipeline")
    if any(isinstance(module, DistributedDataParallel) for module in every):
        raise TypeError("DistributedDataParallel reduces gradients itself; attach the recipe, or replicate its .module")
    for module in every:
        refuse_sharded(module, "replicate")
    whole = every[0] if len(every) == 1 else nn.ModuleList(every)
    parameters = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    assembly.check_real(parameters)
    refuse_meta(state_of(whole))
    assembly.check_takeover(recipe, parameters)
    return whole, parameters, assembly.listed(optimizer)


def _rows(p: nn.Parameter) -> Tensor:
    if p.grad is not None:
        return p.grad
    indices = torch.empty(1, 0, dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(indices, p.new_empty(0, p.shape[1]), p.shape, check_invariants=False)
