"""The verbs that handles of replicas without DDP have in common."""

from collections.abc import Mapping
from typing import Any

from thinwire.collectives import Group
from thinwire.handle import Handle, MemoryUse
from thinwire.integrations.attachments.attachment import Attachment
from thinwire.integrations.membership.state import Standing
from thinwire.trace import Stats


class Served(Handle):
    """A handle whose attachment does the work. `attachment` is where steps, memories and figures are."""

    attachment: Attachment

    @property
    def group(self) -> Group:
        """The ranks that hold a replica each."""
        return self.attachment.group

    @property
    def memory(self) -> MemoryUse:
        """What this rank holds between steps and takes within one. Copies of gradients count as staging."""
        return self.attachment.memory.and_staging(self._copies)

    @property
    def _copies(self) -> int:
        """Bytes of the second copies of gradients. By default there are none."""
        return 0

    def stats(self) -> Stats:
        """Return the figures of the latest step and of all steps so far. Call it after the optimizer's step."""
        return self.attachment.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memories and step, as tensors and plain containers. Save it on every rank."""
        return self.attachment.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict`. A collective, which raises as `Attachment.load_state_dict` does."""
        self.attachment.load_state_dict(saved)

    def check_state_dict(self, saved: Mapping[str, Any]) -> Standing:
        """Return where this rank would go on from; see `Attachment.check_state_dict`."""
        return self.attachment.check_state_dict(saved)

    def differing_parameters(self) -> list[str]:
        """Return the names of parameters that differ between ranks. A collective: call it on every rank."""
        return self.attachment.differing_parameters()

    def forget(self) -> None:
        """Drop all residuals, including momentum in the memories. Call it on every rank."""
        self.attachment.forget()

    def keep_step(self) -> None:
        """Say that the gradients in place have been applied; see `Attachment.keep_step`."""
        self.attachment.keep_step()

    def drop_step(self) -> None:
        """Say that the gradients in place will not be applied. Zeroing them says the same."""
        self.attachment.drop_step()

    def remove(self) -> None:
        """Detach: from now on gradients are averaged uncompressed. A collective; call it between steps.

        `Attachment.remove` says what becomes of the residual, and what is raised.
        """
        self.attachment.remove()
