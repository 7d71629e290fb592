"""What handles of sharded models have in common whose all-gathers may go through thinwire."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from thinwire.collectives import Group
from thinwire.gathers import Gathers, Lossless
from thinwire.integrations.attachments.attachment import Attached
from thinwire.integrations.membership.membership import agreed
from thinwire.integrations.sharding.backward import Arrivals, Backwards
from thinwire.integrations.sharding.copies import Copies
from thinwire.integrations.sharding.fsdp import sharded_modules
from thinwire.integrations.sharding.lane import Coded

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
    """A handle that knows how parameters are gathered."""

    _arrivals: Arrivals
    _backwards: Backwards
    _gathers: Copies | Coded | None

    def _gather(self, model: nn.Module, gathers: Copies | Coded | None) -> None:
        """Have the all-gathers of this model travel so. What an earlier handle has them do ends."""
        self._gathers, modules = gathers, sharded_modules(model)
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
        if gathers:
            gathers.begin()
            _at_work.update(dict.fromkeys(modules, weakref.ref(gathers)))

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
        self._backwards.compare(lambda: self.check_state_dict(saved))
        super().load_state_dict(saved)
        self.refresh()

    @override
    def differing_parameters(self) -> list[str]:
        """Return the names of parameters that differ between ranks, those of gathered copies too; a collective."""
        return sorted({*super().differing_parameters(), *(self._gathers.differing() if self._gathers else ())})
