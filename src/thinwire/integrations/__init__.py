"""Integration with PyTorch's own parallelism: the code that touches your model, its gradients and its optimizer.

Its packages, lowest layer first: `training`, `momentum`, `membership`, `attachments`; then `sharding`, `workers` and
`replicas`, which have the functions that you call; and `checkpoints`.
"""

from thinwire.integrations.attachments.attachment import Attachment
from thinwire.integrations.checkpoints.checkpoint import Checkpoint
from thinwire.integrations.membership.redistribution import redistribute
from thinwire.integrations.replicas.ddp import attach
from thinwire.integrations.replicas.profiling import plan, profile
from thinwire.integrations.replicas.replicate import Replicas, replicate
from thinwire.integrations.sharding.scatter import Scattered, scatter
from thinwire.integrations.sharding.shard import Shards, shard
from thinwire.integrations.workers.outer import outer
from thinwire.integrations.workers.outer_handle import Outer

__all__ = [
    "Attachment",
    "Checkpoint",
    "Outer",
    "Replicas",
    "Scattered",
    "Shards",
    "attach",
    "outer",
    "plan",
    "profile",
    "redistribute",
    "replicate",
    "scatter",
    "shard",
]
