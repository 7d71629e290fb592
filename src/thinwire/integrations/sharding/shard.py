"""Sharded models: FSDP2 shards within an island, and replicas between islands exchange the gradients of their shards.

The handle follows FSDP's backward passes; arrivals.py exchanges what they deliver.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from thinwire.checked import BODY, checked
from thinwire.collectives import Group
from thinwire.errors import FingerprintError, StateError
from thinwire.integrations.attachments.assembly import (
    ASSEMBLY_ERRORS,
    Optimizers,
    assembled,
    check_fingerprint,
    check_free,
    check_takeover,
    described,
    listed,
)
from thinwire.integrations.attachments.attachment import Attachment, LossScaler
from thinwire.integrations.attachments.served import Served
from thinwire.integrations.membership import state
from thinwire.integrations.membership.together import agreed, together
from thinwire.integrations.sharding.arrivals import Arrivals
from thinwire.integrations.sharding.fsdp import (
    averages,
    exchanges_now,
    held_parameters,
    islands,
    replicate_group,
    sharded_modules,
    sharded_parameters,
)
from thinwire.integrations.sharding.layout import Layout
from thinwire.integrations.training.gradients import local
from thinwire.reducer import Reducer


@final
@checked
class Shards(Served):
    """A sharded model whose replicas exchange gradients, and a handle: see `shard`. `attachment` does the work.

    `attachment` knows this rank's shards alone, and its ranks are those that hold the same ones.
    """

    def __init__(self, model: nn.Module, attachment: Attachment, island: Sequence[Group], *, overlap: bool) -> None:
        self.attachment = attachment
        self.layout = Layout.sharded(attachment.group, island, attachment.parameters)
        self._arrivals = Arrivals(attachment, island, may_overlap=overlap)
        self._modules = sharded_modules(model)
        self._queued = self._agreed = self._now = False
        self._hooks = [module.register_forward_hook(self._after_forward) for module in self._modules]
        for module in self._modules:  # before FSDP's own, which gathers parameters
            self._hooks.append(module.register_forward_pre_hook(self._before_forward, prepend=True))
        for name, p in attachment.parameters.items():
            self._hooks.append(p.register_post_accumulate_grad_hook(partial(self._note_arrived, name)))

    @property
    def memory_bytes(self) -> int:
        """Bytes this rank holds between steps: what waits for its shards, and a second copy of their gradients."""
        return self.attachment.memory_bytes + self._arrivals.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Return what waits for this rank's shards, and its step, in plain containers. Save it on every rank."""
        dims = self.layout.cuts.dims
        return self.attachment.state_dict() | {"shard": self.layout.shard} | ({"dims": dict(dims)} if dims else {})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict`. A collective of all ranks of the mesh.

        If any rank's state does not fit it or the other ranks' states, raises ValueError on every rank and changes
        nothing.
        """
        self._compare(lambda: self.check_state_dict(saved))
        self.attachment.load_state_dict(saved)

    def check_state_dict(self, saved: Mapping[str, Any]) -> state.Standing:
        """Return where this rank would go on from. Raises ValueError if `load_state_dict` would, on this rank alone."""
        standing = self.attachment.check_state_dict(saved)
        if saved.get("shard") != self.layout.shard:
            raise ValueError(
                f"the state is of shard {saved.get('shard')}, a rank and size for each dimension of the mesh, and this "
                f"is {self.layout.shard}; each rank saves its own and loads that"
            )
        if saved.get("dims", {}) != self.layout.cuts.dims:
            raise ValueError(
                f"parameters were cut along other dimensions than the first: {saved.get('dims', {})}, and now "
                f"{dict(self.layout.cuts.dims)}; shard the model as it was"
            )
        return standing

    def remove(self) -> None:
        """Give the model back: from now on gradients are averaged uncompressed. A collective; call it between steps.

        What waits goes out as `Attachment.remove` says. If it raises RuntimeError on any rank, it does on every rank.
        """
        membership = self.attachment.membership
        agreed(self._everybody, membership.handover.check_returnable, RuntimeError)
        membership.release(averages="what thinwire.shard returned does that")

    @property
    def _everybody(self) -> Sequence[Group]:
        return self.layout.groups

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        """Before the first collective of a training, agree on where to go on from: a rank may not have loaded."""
        if not self._agreed and module.training and torch.is_grad_enabled():
            self._agree()

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        """Learn of the backward that starts at this output, before FSDP adds to any gradient."""
        if not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() < 0:  # else a checkpoint recomputes
            self._queued = False  # a backward may have raised
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(self._before_backward)

    def _before_backward(self, gradient: object) -> None:
        if self._queued:
            return
        if self.attachment.ended:
            return self._unhook()
        steps = self.attachment.steps
        steps.close_if_done()
        for name in list(steps.gradients.reduced):
            if steps.gradients.gone(name):
                steps.thrown_away(name)
        self._queue()

    def _queue(self) -> None:
        self._check_served()
        self._queued, self._now = True, exchanges_now(self._modules)
        self._arrivals.clear()
        # Once more at the end, behind what FSDP has queued since.
        _at_the_end(lambda: _at_the_end(self._after_backward))

    def _check_served(self) -> None:
        """Raise RuntimeError if FSDP reduces other parameters than those whose gradients are exchanged."""
        held, served = held_parameters(self._modules), self.attachment.names.keys()
        if not served <= held or any(p.requires_grad for p in held - served):
            raise RuntimeError(
                "parameters have been replaced or thawed since shard(), as load_state_dict(assign=True) does: call "
                "thinwire.shard anew, with an optimizer of those that there are now"
            )

    def _note_arrived(self, name: str, p: nn.Parameter) -> None:
        """Note that FSDP has added to the gradient of this shard."""
        if not self._queued:
            raise RuntimeError(
                f"the gradient of {name!r} came from an output that no hook has seen: return tensors, or containers "
                "of them that torch.utils._pytree knows, from the modules that fully_shard was called with"
            )
        self._arrivals.note(name, p, now=self._now)

    def _after_backward(self) -> None:
        self._queued = False
        if self._arrivals.some and self._now:
            if not self._agreed:
                self._agree()
            self._arrivals.exchange()

    def _agree(self) -> None:
        """Agree on where to go on from, in the collectives that `load_state_dict` has on ranks that call it."""
        steps = self.attachment.steps
        self._compare(lambda: state.Standing(step=steps.step, draw=steps.draw))

    def _compare(self, mine: Callable[[], state.Standing]) -> None:
        """Compare where the ranks of the mesh stand. Raises on every rank of it or on none."""
        together(self._everybody, lambda group: state.agree(group, mine), ValueError, StateError)
        self._agreed = True

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


@checked
def shard(
    model: nn.Module,
    recipe: Annotated[Reducer, BODY],
    *,
    mesh: DeviceMesh | Group,
    optimizer: Optimizers = None,
    scaler: LossScaler | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    overlap: bool = True,
) -> Shards:
    """Let `recipe` exchange gradients between the replicas of a model that FSDP2 shards. A collective of all ranks.

    Call `fully_shard` with the dimension of the mesh that shards, and this with the whole mesh:

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        thinwire.shard(model, recipe, mesh=mesh)

    `mesh` has one dimension over which FSDP does not share the parameters. You may also pass that dimension alone, or
    its group. The first replica sends its parameters and buffers to the others. From then on every backward pass ends
    with an exchange: FSDP has reduced within the island, and each rank's shard then becomes the mean over the replicas,
    or their sum after `set_gradient_divide_factor`. `set_requires_gradient_sync(False)` and
    `set_requires_all_reduce(False)` put it off, as in FSDP's own HSDP. `recipe`, `optimizer` and `scaler` are as in
    `thinwire.attach`. What waits takes memory for this rank's shards alone. If a mean is not finite, and anything may
    wait, every gradient becomes NaN on every rank.
    `ignored_params`: plain parameters that you reduce yourself. `overlap`: exchange while backward goes on, from the
    second one on, if FSDP reduced each gradient once in the first.

    Raises TypeError for anything but a recipe, and for a model that is not sharded by FSDP2 as a whole; ValueError for
    a mesh without replicas; FingerprintError where ranks disagree; and MomentumError and RuntimeError as
    `thinwire.attach` does.
    """

    def checked_alone() -> tuple[dict[str, nn.Parameter], list[Group], Group, list[torch.optim.Optimizer]]:
        _check_recipe(recipe)
        parameters = sharded_parameters(model, set(ignored_params))
        check_takeover(recipe, parameters)
        island = islands(parameters.values())
        return parameters, island, replicate_group(mesh, island), listed(optimizer)

    dimensions = mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [mesh]
    parameters, island, group, optimizers = agreed(dimensions, checked_alone, TypeError, ValueError, RuntimeError)
    everybody = [group, *island]
    settings = f"{described(optimizers)}, shards {[each.size() for each in island]}"
    together(everybody, lambda each: check_fingerprint(recipe, parameters, each, settings), FingerprintError)
    modules = sharded_modules(model)

    def put_together() -> Attachment:
        return assembled(
            recipe,
            parameters,
            {p: name for name, p in parameters.items()},
            group,
            settings=f"shard {[each.rank() for each in island]}",
            optimizers=optimizers,
            scaler=scaler,
            divisor=lambda joined, continues: group.size() if averages(modules) else 1,
            may_be_unused=False,
        )

    attachment = agreed(everybody, put_together, *ASSEMBLY_ERRORS, undo=Attachment.end)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(local(tensor).detach(), group=group, group_src=0)
    return Shards(model, attachment, island, overlap=overlap)


def _check_recipe(recipe: object) -> None:
    if not isinstance(recipe, Reducer):
        raise TypeError(
            f"shard takes a recipe such as recipes.topk(density=0.01); got {recipe!r:.60}. Plans are made for DDP's "
            "buckets, so choose a recipe by name"
        )
    check_free(recipe)


def _at_the_end(call: Callable[[], None]) -> None:
    """Call this when the backward pass that is under way is over."""
    Variable._execution_engine.queue_callback(call)
