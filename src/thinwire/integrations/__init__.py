"""Bridges to PyTorch's own parallelism."""

from thinwire.integrations.attachment import Attachment
from thinwire.integrations.checkpoint import Checkpoint
from thinwire.integrations.ddp import attach
from thinwire.integrations.outer import outer
from thinwire.integrations.outer_handle import Outer
from thinwire.integrations.profiling import plan, profile
from thinwire.integrations.redistribution import redistribute
from thinwire.integrations.replicate import Replicas, replicate
from thinwire.integrations.shard import Shards, shard

__all__ = [
    "Attachment",
    "Checkpoint",
    "Outer",
    "Replicas",
    "Shards",
    "attach",
    "outer",
    "plan",
    "profile",
    "redistribute",
    "replicate",
    "shard",
]
