"""Models that FSDP2 shards over all ranks, without replicas: what a rank adds to the others' shards is compressed."""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from thinwire.checked import BODY, checked
from thinwire.codecs import Identity
from thinwire.collectives import Group
from thinwire.errors import FingerprintError
from thinwire.gathers import Gathers
from thinwire.integrations.attachments import assembly
from thinwire.integrations.attachments.assembly import Optimizers
from thinwire.integrations.attachments.attachment import LossScaler
from thinwire.integrations.membership import state
from thinwire.integrations.membership.membership import agreed, raise_on_all, together
from thinwire.integrations.sharding import fsdp
from thinwire.integrations.sharding.contributions import Contributions
from thinwire.integrations.sharding.gathering import Gathering, carried
from thinwire.integrations.sharding.layout import Layout
from thinwire.integrations.training.gradients import islands
from thinwire.memories import NoMemory
from thinwire.reducer import Reducer, Released, ToOwners
from thinwire.reducer.owners import to_owners


@final
class Scattered(Gathering):
    """A model sharded over all ranks whose gradients reach their owners compressed: what `scatter` returns.

    The residual is what this rank has not delivered to any owner. It has the names and lengths of whole parameters, so
    its state has the same form as `attach`'s, and another number of ranks deals it out (`redistribution.redistribute`).
    """

    _averages = "what thinwire.scatter returned does that"

    @override
    def check_state_dict(self, saved: Mapping[str, Any]) -> state.Standing:
        if isinstance(saved, Mapping) and saved.get("shard") is not None:
            raise ValueError(
                f"the state belongs to shard {saved['shard']} of a model with replicas, but this one has none: load it "
                "with thinwire.shard"
            )
        return super().check_state_dict(saved)

    @override
    def differing_parameters(self) -> list[str]:
        return self._gathers.differing() if self._gathers else []  # no two ranks hold the same, but for copies

    def remove(self) -> None:
        """Detach: from now on gradients go to their owners uncompressed. A collective; call it between steps.

        The residual is sent with the next gradients.
        """
        membership = self.attachment.membership
        contributions = membership.recipe
        assert isinstance(contributions, Contributions)
        super().remove()
        dense = ToOwners(memory=NoMemory(), codec=Identity())
        contributions.recipe = Released(waiting=tuple(contributions.memories()), dense=dense)
        membership.recipe = contributions


@checked(on_error=raise_on_all(fsdp.mesh_groups))
def scatter(
    model: nn.Module,
    recipe: Annotated[Reducer, BODY],
    *,
    mesh: DeviceMesh | Group,
    optimizer: Optimizers = None,
    scaler: LossScaler | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    overlap: bool = True,
    gathers: Gathers | None = None,
) -> Scattered:
    """Let `recipe` compress FSDP2's reduce-scatter of gradients, where there are no replicas; a collective.

    Each rank encodes its contribution to every other rank's shards and sends it there, to be summed. The residual stays
    with the sender, and takes 8 bytes for every element of the whole model. With replicas, `shard` keeps FSDP's
    all-gathers of parameters off the slow network; here `gathers` compresses them. Gradients become their mean over the
    ranks. If a mean is not finite, and the recipe keeps residuals, every gradient becomes NaN on every rank.

    Args:
        model: One that `fully_shard` has sharded.
        recipe: One that encodes and gathers, with plain error feedback or no memory.
        mesh: The one-dimensional mesh that was passed to `fully_shard`.
        optimizer: As in `shard`.
        scaler: As in `shard`.
        ignored_params: As in `shard`.
        overlap: As in `shard`.
        gathers: How parameters are gathered: by default as FSDP does, else `thinwire.gathers.Differences(bits=4)` or
            `thinwire.gathers.Lossless()`.

    Returns:
        The handle. Gradients are exchanged in backward from now on.

    Raises:
        TypeError: For a recipe of another kind; unless FSDP2 shards the whole model, by rows; for float16; and if FSDP
            reduces in a dtype other than float32 or bfloat16.
        ValueError: For a mesh of several dimensions.
        FingerprintError: Where ranks disagree.
        RuntimeError: As `thinwire.attach` does.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> model = fully_shard(nn.Linear(64, 64), mesh=mesh)
        >>> handle = tw.scatter(model, tw.recipes.topk(density=0.01), mesh=mesh)
    """
    groups = fsdp.mesh_groups({"mesh": mesh})
    parameters, contributions, optimizers = agreed(
        groups, lambda: _looked_at(model, recipe, groups, optimizer, set(ignored_params), gathers is not None)
    )
    settings = f"scatter, gathers {gathers}"  # compared first: what carries gathers makes a group
    check = assembly.check_fingerprint
    together(groups, lambda group: check(contributions, parameters, group, settings), FingerprintError)
    carrier = carried(model, gathers, groups)
    attachment = assembly.assembled(
        groups,
        contributions,
        parameters,
        settings=settings,
        optimizers=optimizers,
        scaler=scaler,
        everything=dict(model.named_parameters()).copy,  # as DTensors: an evaluation may leave them whole
    )
    with assembly.opening(attachment):
        layout = Layout.whole(groups[0], {})
        return Scattered(model, attachment, layout, carrier, overlap=overlap, contributions=contributions)


def _looked_at(
    model: nn.Module,
    recipe: Reducer,
    groups: list[Group],
    optimizer: Optimizers,
    ignored: Collection[nn.Parameter],
    gathers: bool,
) -> tuple[dict[str, nn.Parameter], Contributions, list[torch.optim.Optimizer]]:
    """Return what there is to exchange, and by what. Raises what `scatter` does about this rank alone."""
    assembly.check_recipe(recipe, "scatter")
    parameters = fsdp.sharded_parameters(model, ignored)
    fsdp.check_rows(parameters)
    if groups and groups[0].size() > 1:
        fsdp.check_averaged(fsdp.sharded_modules(model), parameters)
    _check_mesh(groups, islands(parameters.values()))
    if gathers:
        fsdp.check_gathered(model, groups)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    contributions = Contributions(to_owners(recipe), shapes, alone=groups[0].size() == 1)
    assembly.check_whole(parameters, "scatter")
    assembly.check_takeover(contributions, parameters)
    return parameters, contributions, assembly.listed(optimizer)


def _check_mesh(groups: list[Group], sharers: list[Group]) -> None:
    """Raise ValueError unless FSDP shards the parameters over all ranks of the only group."""
    sharing = [dist.get_process_group_ranks(group) for group in sharers]
    meant = [dist.get_process_group_ranks(group) for group in groups]
    if len(meant) != 1 or sharing not in ([], meant) or (not sharing and len(meant[0]) > 1):
        raise ValueError(
            f"FSDP shards the parameters over ranks {sharing}, but the mesh has ranks {meant}: scatter takes the one "
            "dimension that fully_shard was called with. Where there are replicas, call thinwire.shard"
        )
