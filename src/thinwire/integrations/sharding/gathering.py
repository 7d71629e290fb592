"""What handles of sharded models have in common whose all-gathers may go through thinwire."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from thinwire.collectives import Group
from thinwire.gathers import Gathers, Lossless
from thinwire.integrations.attachments.attachment import Attached, Attachment
from thinwire.integrations.membership.membership import agreed
from thinwire.integrations.sharding.backward import Arrivals, Backwards
from thinwire.integrations.sharding.contributions import Contributions
from thinwire.integrations.sharding.copies import Copies
from thinwire.integrations.sharding.fsdp import sharded_modules
from thinwire.integrations.sharding.lane import Coded
from thinwire.integrations.sharding.layout import Layout
from thinwire.integrations.training.gradients import own_length

_log = logging.getLogger("thinwire")

_at_work: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Copies | Coded]]" = weakref.WeakKeyDictionary()
"""What gathers the parameters of each module that `fully_shard` was called with, if FSDP does not."""


def carried(model: nn.Module, how: Gathers | None, groups: Sequence[Group]) -> Copies | Coded | None:
    """Return what can carry the all-gathers of this model over the first group; see `Copies`. A collective.

    Raises on every rank or on none. None, or a rank alone, leaves gathers as they are.
    """
    if how is None or not groups or groups[0].size() == 1:
        return None
    modules, names = sharded_modules(model), {p: name for name, p in model.named_parameters()}
    if isinstance(how, Lossless):
        return agreed(groups, lambda: Coded(modules, groups))
    return agreed(groups, lambda: Copies(modules, how, groups, names))


class Gathering(Attached):
    """A handle of a model that FSDP has sharded, whose gradients of `layout` are exchanged in backward.

    With `contributions`, in place of FSDP's reduce-scatter. `gathers` carries its all-gathers, if FSDP does not.
    """

    def __init__(
        self,
        model: nn.Module,
        attachment: Attachment,
        layout: Layout,
        gathers: Copies | Coded | None,
        *,
        overlap: bool,
        contributions: Contributions | None = None,
    ) -> None:
        self._attachment, self.layout, self._gathers = attachment, layout, gathers
        attachment.serve(model)
        modules, groups = sharded_modules(model), layout.groups
        # A DTensor's length is that of the whole parameter, so ranks with fewer rows cut the same buckets.
        island, length = (groups[1:], own_length) if contributions is None else (groups, nn.Parameter.numel)
        self._arrivals = Arrivals(attachment, island, may_overlap=overlap, length=length)
        self._backwards = Backwards(modules, attachment, self._arrivals, gathers, contributions)
        self._gather(modules)
        for module in modules if contributions is not None else ():
            module.set_custom_reduce_scatter(contributions)

    def _gather(self, modules: Sequence[Any]) -> None:
        """Have the all-gathers of these modules travel as they are to. What an earlier handle has them do ends."""
        for earlier in {each for module in modules if module in _at_work and (each := _at_work.pop(module)())}:
            if left := [module for module, each in _at_work.items() if each() is earlier]:
                _log.warning(
                    "%d modules of an earlier handle are gathered uncompressed from now on: to go on as they were, "
                    "pass the whole model",
                    len(left),
                )
            for module in left:
                del _at_work[module]
            earlier.remove()
        if self._gathers:
            self._gathers.begin()
            _at_work.update(dict.fromkeys(modules, weakref.ref(self._gathers)))

    @property
    def gathered_bytes(self) -> int:
        """What this rank has sent so far for gathers of parameters: 0 without `gathers=`, as FSDP sends them then."""
        return self._gathers.sent_bytes if self._gathers else 0

    def refresh(self) -> None:
        """Have the next gathers send parameters exactly. Loading and saving call it.

        One rank's call will do, or one in each island.
        """
        if self._gathers:
            self._gathers.refresh()

    @property
    @override
    def _copies(self) -> int:
        return self._arrivals.nbytes + (self._gathers.nbytes if self._gathers else 0)

    @override
    def state_dict(self) -> dict[str, Any]:
        self.refresh()  # or else who resumes would compute with other parameters than who goes on
        return super().state_dict()

    @override
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        self.refresh()

    @override
    def differing_parameters(self) -> list[str]:
        """Return the names of parameters that differ between ranks, those of gathered copies too; a collective."""
        return sorted({*super().differing_parameters(), *(self._gathers.differing() if self._gathers else ())})

    @override
    def remove(self) -> None:
        super().remove()
        if self._gathers:
            self._gathers.remove()
