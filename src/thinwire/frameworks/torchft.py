"""torchft: replicas that join and leave from step to step, and steps that are not committed.

torchft makes a new process group whenever the replicas change, and does not commit a step in which anything failed. The
exchange follows: a replica's residual stays with it, and a step that is not committed leaves it as it was.
"""

import logging
from collections.abc import Iterable
from typing import Annotated, Any, Protocol, final, runtime_checkable

import torch.distributed as dist
import torchft
from torch import nn
from typing_extensions import override

from thinwire import integrations
from thinwire.checked import BODY, checked
from thinwire.collectives import Group, adopt_group, forget_group
from thinwire.errors import FingerprintError, PayloadError
from thinwire.integrations import Replicas
from thinwire.integrations.attachments.assembly import Optimizers
from thinwire.integrations.attachments.attachment import Attached, LossScaler
from thinwire.integrations.membership.redistribution import without_residuals
from thinwire.reducer import Reducer

_log = logging.getLogger("thinwire")
_distributed: Any = dist  # whose names are not all exported, as mypy has it


@runtime_checkable
class Manager(Protocol):
    """The part of torchft.Manager that thinwire uses."""

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None:
        """Send and load something with the state that a replica recovers from."""

    def wait_quorum(self) -> None:
        """Wait until the replicas of this step are known."""

    def is_participating(self) -> bool:
        """Whether this replica takes part in this step."""

    def errored(self) -> Any:
        """Return what has failed in this step, or None."""

    def report_error(self, e: Exception) -> None:
        """Report an error, so that this step is not committed."""


class ProcessGroupGloo(torchft.ProcessGroupGloo):  # type: ignore[misc]  # mypy passes over torchft
    """torchft's ProcessGroupGloo, which thinwire's exchanges can use too: pass it to the Manager and to `replicate`.

    torch.distributed.init_process_group must have been called with the ranks of this replica, one or several.
    """

    _pg: Group | None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Group:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; expected a process group of this replica's ranks: call "
                "init_process_group first, with world_size=1 if a replica is one process"
            )
        group, twin = (
            super(ProcessGroupGloo, self)._create_pg(_distributed.PrefixStore(name, store), rank, world_size)
            for name in ("thinwire", "thinwire-rounds")
        )
        adopt_group(group, twin, store)
        return group

    @property
    def group(self) -> Group | None:
        """The group of this step's replicas, or None if it has ended."""
        return self._pg

    def abort(self, errored: bool = True) -> None:
        """End what is under way, and forget the group."""
        group, self._pg = self._pg, None
        if group is not None:
            forget_group(group)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name by which torchft registers it."""
        return "thinwire-gloo"


@final
class Members(Attached):
    """What `replicate` returns: a handle for a changing set of replicas."""

    def __init__(self, manager: Manager, links: ProcessGroupGloo, replicas: Replicas) -> None:
        self._manager, self._links, self._replicas = manager, links, replicas
        self._attachment = replicas.attachment
        join = self.attachment.membership.join
        manager.register_state_dict_fn("thinwire", join, lambda: without_residuals(self.state_dict()))

    @property
    @override
    def _copies(self) -> int:
        return self._replicas._copies

    def reduce(self) -> None:
        """Replace every gradient by its mean over the replicas of this step, through the recipe.

        Call it once a step, after backward and before `manager.should_commit()` or the step of torchft's optimizer. If
        the exchange fails, the manager is told, and does not commit the step.

        Raises:
            RuntimeError: On a replica that does not take part in the step.
            FingerprintError: Where replicas disagree.
        """
        self._manager.wait_quorum()
        if self._manager.errored():
            return
        if not self._manager.is_participating():
            raise RuntimeError(
                "this replica does not participate in the step, because it is a spare, or is recovering: make the "
                "Manager with use_async_quorum=False and WorldSizeMode.DYNAMIC"
            )
        try:
            if (group := self._links.group) is None:
                raise RuntimeError("the process group was shut down: make a new one, and new replicas")
            if group is not self.group:
                self._replicas.regroup(group)
            self._replicas.reduce()
        except FingerprintError:  # on all replicas, and in every later step too
            raise
        except (RuntimeError, PayloadError) as error:
            _log.warning("the exchange failed, so torchft will not commit the step: %s", error)
            self.attachment.steps.take_back()
            self._links.abort()  # or the others would wait for this rank
            self._manager.report_error(error)


@checked
def replicate(
    manager: Manager,
    links: ProcessGroupGloo,
    modules: nn.Module | Iterable[nn.Module],
    recipe: Annotated[Reducer, BODY],
    *,
    optimizer: Optimizers = None,
    scaler: LossScaler | None = None,
) -> Members:
    """Let `recipe` exchange the gradients of a model whose replicas torchft manages; call `reduce()` in every step.

    A joining replica starts at the others' step with an empty residual; a leaving one's is lost.
    The model and the optimizer are yours to send: pass `state_dict` and `load_state_dict` to the Manager.

    Args:
        manager: torchft's. A replica is one process here.
        links: The process group that the manager has.
        modules: As in `thinwire.replicate`.
        recipe: As in `thinwire.replicate`.
        optimizer: As in `thinwire.replicate`.
        scaler: As in `thinwire.replicate`.
    """
    if dist.get_world_size() != 1:
        raise RuntimeError(
            f"this replica has {dist.get_world_size()} processes; expected one with the whole model: start each "
            "replica with a torchrun of its own"
        )
    return Members(manager, links, integrations.replicate(modules, recipe, optimizer=optimizer, scaler=scaler))
