"""What becomes of our hooks in a copy of a model, and in one that was saved: nothing, as of DDP's own hook."""

from typing import Any, final

from torch import nn


@final
class Nobody:
    """A hook before the forward pass that does nothing."""

    def __call__(self, model: nn.Module, inputs: object) -> None:
        """Do nothing."""


STAYS_BEHIND: tuple[Any, ...] = (Nobody, ())
"""What `__reduce__` of a hook returns that stays behind."""
