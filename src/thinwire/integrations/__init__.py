"""Bridges to PyTorch's own parallelism."""

from thinwire.integrations.attachment import Attachment
from thinwire.integrations.ddp import attach
from thinwire.integrations.profiling import plan, profile
from thinwire.integrations.replicate import Replicas, replicate

__all__ = ["Attachment", "Replicas", "attach", "plan", "profile", "replicate"]
