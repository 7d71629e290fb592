"""Bridges to PyTorch's own parallelism."""

from thinwire.integrations.attachment import Attachment
from thinwire.integrations.ddp import attach

__all__ = ["Attachment", "attach"]
