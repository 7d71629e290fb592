"""Do workers start alike, and is all training counted? Models loaded late, and steps of optimizers not given."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from thinwire.collectives import Group, all_gather_plain
from thinwire.integrations.membership.membership import agreed
from thinwire.integrations.training.drift import digest
from thinwire.integrations.training.gradients import local
from thinwire.integrations.training.optimizers import observe
from thinwire.integrations.workers.fragments import Fragment

_log = logging.getLogger("thinwire")


@final
class Start:
    """What a worker's own parameters must be before an inner step. `pending`: whether workers have yet to compare.

    `reloaded`: whether a state was loaded into the model alone since, and is still there.

    `_wrong` says what is wrong if they have moved; after the handle has loaded a state, only if nothing was `_made` of
    the model since. Nothing is if it is empty.
    """

    def __init__(self, fragments: Sequence[Fragment], frozen: Mapping[str, Tensor]) -> None:
        self._fragments, self._frozen = fragments, frozen
        self._wrong, self.pending = _LATE, True
        self._made: Sequence[int] = ()
        self.reloaded = False

    def model_loads(self, *_: object) -> None:
        """Note that a state is loaded into the model. Before workers compare, they look for themselves."""
        self.reloaded = not self.pending

    def warn(self) -> None:
        """Say once if a state has been loaded into the model alone. Not a collective: it may be on one worker only."""
        if self.reloaded:
            self.reloaded = False
            _log.warning(_RELOADED)

    def loads(self) -> None:
        """Note that the handle is about to load a state. The model may have been loaded before, or will be."""
        if self._wrong in (_LATE, _CHANGED) and not self._moved():
            self._wrong, self._made = _UNLOADED, self._versions()
        elif self._wrong != _UNLOADED:
            self._wrong = ""
        self.pending, self.reloaded = True, False

    def joins(self) -> None:
        """Note that this worker has joined, and has the global parameters."""
        self._wrong = _CHANGED

    def check(self, group: Group) -> bool:
        """Return whether all workers have loaded the same, else RuntimeError on all; a collective, also of islands."""
        loaded = self._wrong == _UNLOADED and self._versions() != self._made
        word = self._wrong if self._wrong and self._moved() and not loaded else ""
        own = [digest(x).tolist() for each in self._fragments for x in each.own().values()] if word else []
        frozen = {name: digest(local(x)).tolist() for name, x in self._frozen.items()}
        everyone = all_gather_plain([word, own, frozen], group)
        late = agreed(self._fragments[0].islands, lambda: _judged(everyone), RuntimeError)
        differing = [name for name in frozen if any(each[2][name] != frozen[name] for each in everyone)]
        if differing and group.rank() == 0:
            _log.warning("%d frozen parameters differ between workers, such as %r", len(differing), differing[0])
        if late and group.rank() == 0:
            _log.warning(_ADOPTED)
        self._wrong, self.pending = "", False
        return bool(late)

    def _versions(self) -> list[int]:
        """Return numbers that grow with whatever is loaded, even if it is what was there; DTensors count it alone."""
        return [x._version for fragment in self._fragments for p in fragment.own_parameters for x in (p, local(p))]

    def _moved(self) -> bool:
        return any(fragment.moved() for fragment in self._fragments)


_LATE = (
    "their models were loaded between outer() and the first step, and differ between workers: the change would count "
    "as training, and be undone. To resume, call handle.load_state_dict() with what each worker saved, too. To "
    "start from other weights, load them before outer(), or the same on every worker. handle.go_back() undoes this"
)
_CHANGED = (
    "their models were changed after they had joined: load before outer(), or call handle.go_back() on "
    "them, as what was loaded would count as training"
)
_UNLOADED = (
    "the handle's state was loaded, but not the model: load the model that each worker saved beside it, too, or call "
    "handle.go_back() on every worker"
)
_ADOPTED = (
    "the model was loaded after outer(), with the same weights on all workers, which continue from these. If you are "
    "resuming, load the handle's state, too, or outer momentum and residuals start from scratch"
)
_RELOADED = (
    "a state was loaded into this worker's model in mid-training, and the next outer step counts the difference as "
    "training. To go back to a checkpoint, call handle.load_state_dict() on every worker with what it saved, too; to "
    "drop what was loaded, call handle.go_back()"
)


def _judged(everyone: Sequence[Sequence[Any]]) -> bool:
    """Return whether all were loaded late and are alike. Raises RuntimeError where something is wrong."""
    if loading := [rank for rank, said in enumerate(everyone) if len(said) != 3]:
        raise RuntimeError(f"workers {loading} load a state, and the others train: call load_state_dict() on all")
    wrong = {rank: word for rank, (word, *_) in enumerate(everyone) if word}
    if not wrong:
        return False
    if set(wrong.values()) == {_LATE} and all(each[:2] == everyone[0][:2] for each in everyone):
        return True
    word = next(iter(wrong.values()))
    ranks = [each for each, said in wrong.items() if said == word]
    raise RuntimeError(f"workers {ranks} of {len(everyone)}: {word}")


@final
class Strangers:
    """Counts steps of other optimizers with these parameters since the latest that counts: nothing is exchanged."""

    def __init__(self, parameters: Collection[int], optimizers: Collection[torch.optim.Optimizer]) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._steps, self.due = 0, 0
        observe(self)

    def about_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """Let it."""

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        """Warn once if more than `due` steps have gone by: one alone may be that of a wrapper."""
        if optimizer in self._optimizers:
            self._steps = 0
        elif not evaluated and any(
            id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]
        ):
            self._steps += 1
            if self._steps == self.due + 1:
                _log.warning(_STRANGER, type(optimizer).__name__, self._steps)


_STRANGER = (
    "a %s that outer() was not given trains this worker's parameters, and has taken the latest %d steps: they are not "
    "counted, so that no outer step follows. On every worker, remove() this handle, and make another with the optimizer"
)
