"""thinwire: distributed training over slow links: send less, with error feedback.

import thinwire as tw
tw.attach(ddp_model, tw.recipes.topk(density=0.01))
"""

from thinwire import (
    codecs,
    exchanges,
    formats,
    gathers,
    memories,
    outer_steps,
    payloads,
    pipeline,
    planner,
    recipes,
    reducer,
    schedules,
)
from thinwire import errors as errors
from thinwire import server as server
from thinwire.handle import Handle
from thinwire.integrations import (
    Checkpoint,
    attach,
    outer,
    plan,
    profile,
    redistribute,
    replicate,
    scatter,
    shard,
)
from thinwire.outer_steps import OuterSteps
from thinwire.planner import Budget
from thinwire.server import connect, serve
from thinwire.version import __version__ as __version__

__all__ = [
    "Budget",
    "Checkpoint",
    "Handle",
    "OuterSteps",
    "attach",
    "codecs",
    "connect",
    "exchanges",
    "formats",
    "gathers",
    "memories",
    "outer",
    "outer_steps",
    "payloads",
    "pipeline",
    "plan",
    "planner",
    "profile",
    "recipes",
    "redistribute",
    "reducer",
    "replicate",
    "scatter",
    "schedules",
    "serve",
    "shard",
]
