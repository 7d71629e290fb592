"""Bridges to PyTorch's own parallelism."""

from thinwire.integrations.attachment import Attachment
from thinwire.integrations.ddp import attach
from thinwire.integrations.profiling import plan, profile

__all__ = ["Attachment", "attach", "plan", "profile"]
