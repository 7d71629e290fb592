"""Sharded models: FSDP2 shards within an island, and replicas between islands exchange their shards' gradients."""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from thinwire.checked import BODY, checked
from thinwire.collectives import Group
from thinwire.errors import FingerprintError
from thinwire.gathers import Gathers
from thinwire.integrations.attachments import assembly
from thinwire.integrations.attachments.assembly import Optimizers
from thinwire.integrations.attachments.attachment import LossScaler
from thinwire.integrations.membership import state
from thinwire.integrations.membership.membership import agreed, raise_on_all, together
from thinwire.integrations.sharding import fsdp
from thinwire.integrations.sharding.gathering import Gathering, carried
from thinwire.integrations.sharding.layout import Layout
from thinwire.integrations.training.drift import check_shapes, refuse_meta, start_alike, state_of
from thinwire.integrations.training.gradients import islands
from thinwire.reducer import Reducer


@final
class Shards(Gathering):
    """A sharded model whose replicas exchange gradients: what `shard` returns.

    `attachment`, which does the work, knows only this rank's shards; its group is the ranks that hold the same shards.
    """

    _averages = "what thinwire.shard returned does that"

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of this rank's shards, and its step, in plain containers. Save it on every rank."""
        dims = self.layout.cuts.dims
        return super().state_dict() | {"shard": self.layout.shard} | ({"dims": dict(dims)} if dims else {})

    @override
    def check_state_dict(self, saved: Mapping[str, Any]) -> state.Standing:
        standing = super().check_state_dict(saved)
        if saved.get("shard") != self.layout.shard:
            raise ValueError(
                f"the state belongs to shard {saved.get('shard')} (rank and size in each mesh dimension), but this is "
                f"{self.layout.shard}: load on each rank the state that it saved"
            )
        self.layout.cuts.check(saved, ValueError)
        return standing


@checked(on_error=raise_on_all(fsdp.mesh_groups))
def shard(
    model: nn.Module,
    recipe: Annotated[Reducer, BODY],
    *,
    mesh: DeviceMesh | Group,
    optimizer: Optimizers = None,
    scaler: LossScaler | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    overlap: bool = True,
    gathers: Gathers | None = None,
) -> Shards:
    """Let `recipe` exchange gradients between the replicas of a model that FSDP2 shards; a collective of all ranks.

    The first replica sends its parameters and buffers to the others. From then on every backward pass ends with an
    exchange: FSDP has reduced within the island, and each rank's shard then becomes the mean over the replicas, or
    their sum after `set_gradient_divide_factor`. `set_requires_gradient_sync(False)` and
    `set_requires_all_reduce(False)` put it off, as in FSDP's own HSDP. Residuals take memory for this rank's shards
    alone. If a mean is not finite, and the recipe keeps residuals, every gradient becomes NaN on every rank.

    Args:
        model: One that `fully_shard` has sharded.
        recipe: As in `thinwire.attach`.
        mesh: The whole mesh, of which `fully_shard` gets the sharding dimension. The other dimension must be the
            replicas'. You may also pass that dimension alone, or its group.
        optimizer: As in `thinwire.attach`.
        scaler: As in `thinwire.attach`.
        ignored_params: Plain parameters that you reduce yourself.
        overlap: Whether to exchange while backward goes on, from the second one on, if FSDP reduced each gradient once
            in the first.
        gathers: How parameters are gathered within an island, as in `thinwire.scatter`: for islands that span hosts.

    Returns:
        The handle. Gradients are exchanged in backward from now on.

    Raises:
        TypeError: For anything but a recipe, and for a model that is not sharded by FSDP2 as a whole.
        ValueError: For a mesh without replicas.
        FingerprintError: Where ranks disagree.
        RuntimeError: As in `thinwire.attach`, which also raises MomentumError.

    Example:
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        >>> model = fully_shard(nn.Linear(64, 64), mesh=mesh["shard"])
        >>> handle = tw.shard(model, tw.recipes.topk(density=0.01), mesh=mesh)
    """
    parameters, groups, optimizers = agreed(
        fsdp.mesh_groups({"mesh": mesh}),
        lambda: _looked_at(model, recipe, mesh, optimizer, set(ignored_params), gathers is not None),
    )
    (replicas, *island), size = groups, groups[0].size()
    settings = f"{assembly.described(optimizers)}, shards {[each.size() for each in island]}, gathers {gathers}"
    together(groups, lambda group: assembly.check_fingerprint(recipe, parameters, group, settings), FingerprintError)
    agreed(groups, lambda: check_shapes(model, replicas), FingerprintError)  # before it takes over residuals
    carrier = carried(model, gathers, [*island, replicas] if island else [])
    modules, here = fsdp.sharded_modules(model), dict(model.named_parameters())
    attachment = assembly.assembled(
        groups,
        recipe,
        parameters,
        settings=f"shard {[each.rank() for each in island]}",
        optimizers=optimizers,
        scaler=scaler,
        divisor=lambda joined, steps: size if fsdp.averages(modules) else 1,
        everything=lambda: {**dict(model.named_parameters()), **here},  # as DTensors: an evaluation leaves them whole
    )
    with assembly.opening(attachment):
        start_alike(model, replicas)
        return Shards(model, attachment, Layout.sharded(replicas, island, here), carrier, overlap=overlap)


def _looked_at(
    model: nn.Module,
    recipe: Reducer,
    mesh: DeviceMesh | Group,
    optimizer: Optimizers,
    ignored: Collection[nn.Parameter],
    gathers: bool,
) -> tuple[dict[str, nn.Parameter], list[Group], list[torch.optim.Optimizer]]:
    """Return what there is to exchange, and with whom. Raises what `shard` does about this rank alone.

    Of the groups, the first has the ranks that hold the same shards, and the others those that hold the parameters
    together. One after another, they reach every rank of the mesh.
    """
    assembly.check_recipe(recipe, "shard")
    parameters = fsdp.sharded_parameters(model, ignored)
    refuse_meta(state_of(model))
    assembly.check_whole(parameters, "shard")
    assembly.check_takeover(recipe, parameters)
    island = islands(parameters.values())
    if gathers:
        fsdp.check_gathered(model, island)
    groups = [fsdp.replicate_group(mesh, island, parameters.values()), *island]
    return parameters, groups, assembly.listed(optimizer)
