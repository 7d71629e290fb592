"""Where workers start from: what is loaded into a model late, or not at all, must not be taken for training."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor

from thinwire.collectives import Group, all_gather_plain
from thinwire.integrations.membership.membership import agreed
from thinwire.integrations.training.drift import digest
from thinwire.integrations.workers.fragments import Fragment

_log = logging.getLogger("thinwire")


@final
class Start:
    """What a worker's own parameters must be before an inner step. `pending`: whether workers have yet to compare."""

    def __init__(self, fragments: Sequence[Fragment], frozen: Mapping[str, Tensor]) -> None:
        self._fragments, self._frozen = fragments, frozen
        self._rule, self.pending = self._late, True
        self._made: Sequence[int] = ()
        self._loaded = False

    def model_loads(self, *_: object) -> None:
        """Note that a state is loaded into the model. Before workers compare, they look for themselves."""
        self._loaded = not self.pending

    def went_back(self) -> None:
        """Note that the model has the global parameters."""
        self._loaded = False

    def warn(self) -> None:
        """Say once if a state has been loaded into the model alone. Not a collective: it may be on one worker only."""
        if self._loaded:
            self._loaded = False
            _log.warning(_RELOADED)

    def loads(self) -> None:
        """Note that the handle is about to load a state. The model may have been loaded before, or will be."""
        if self._rule in (self._late, self._changed) and not self._moved():
            self._rule, self._made = self._unloaded, self._versions()
        elif self._rule != self._unloaded:
            self._rule = self._anything
        self.pending, self._loaded = True, False

    def joins(self) -> None:
        """Note that this worker has joined, and has the global parameters."""
        self._rule = self._changed

    def check(self, group: Group) -> bool:
        """Return whether all workers have loaded the same, else RuntimeError on all; a collective, also of islands."""
        word = self._rule()
        own = [digest(x).tolist() for each in self._fragments for x in each.own().values()] if word else []
        frozen = {name: digest(x).tolist() for name, x in self._frozen.items()}
        everyone = all_gather_plain([word, own, frozen], group)
        late = agreed(self._fragments[0].islands, lambda: _judged([each[:2] for each in everyone]), RuntimeError)
        differing = [name for name in frozen if any(each[2][name] != frozen[name] for each in everyone)]
        if differing and group.rank() == 0:
            _log.warning("%d frozen parameters differ between workers, such as %r", len(differing), differing[0])
        if late and group.rank() == 0:
            _log.warning(_ADOPTED)
        self._rule, self.pending = self._anything, False
        return bool(late)

    def _versions(self) -> list[int]:
        """Return numbers that grow with whatever is loaded, even if it is what was there."""
        return [x._version for fragment in self._fragments for x in fragment.own().values()]

    def _moved(self) -> bool:
        return any(fragment.moved() for fragment in self._fragments)

    def _late(self) -> str:
        return _LATE if self._moved() else ""

    def _changed(self) -> str:
        return _CHANGED if self._moved() else ""

    def _unloaded(self) -> str:
        return _UNLOADED if self._moved() and self._versions() == self._made else ""

    def _anything(self) -> str:
        return ""


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
    wrong = {rank: word for rank, (word, _) in enumerate(everyone) if word}
    if not wrong:
        return False
    if set(wrong.values()) == {_LATE} and all(each == everyone[0] for each in everyone):
        return True
    word = next(iter(wrong.values()))
    ranks = [each for each, said in wrong.items() if said == word]
    raise RuntimeError(f"workers {ranks} of {len(everyone)}: {word}")
