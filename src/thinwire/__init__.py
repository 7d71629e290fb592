"""thinwire: distributed training over slow links by sending less, with error feedback, and measured.

import thinwire as tw
tw.attach(ddp_model, tw.recipes.topk(density=0.01))
"""

from importlib.metadata import version

from thinwire import (
    codecs,
    exchanges,
    formats,
    memories,
    outer_steps,
    payloads,
    pipeline,
    planner,
    recipes,
    reducer,
    schedules,
)
from thinwire.errors import FingerprintError, MomentumError, PayloadError, ServerError, StateError
from thinwire.handle import Handle
from thinwire.integrations import (
    Attachment,
    Checkpoint,
    Outer,
    Replicas,
    Scattered,
    Shards,
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
from thinwire.planner import Budget, Plan, Profile, Why
from thinwire.server import Server, ServerStatus, Traffic, Trainer, TrainerStatus, connect, serve
from thinwire.stats import Figures, Stats

__version__ = version("thinwire")

__all__ = [
    "Attachment",
    "Budget",
    "Checkpoint",
    "Figures",
    "FingerprintError",
    "Handle",
    "MomentumError",
    "Outer",
    "OuterSteps",
    "PayloadError",
    "Plan",
    "Profile",
    "Replicas",
    "Scattered",
    "Server",
    "ServerError",
    "ServerStatus",
    "Shards",
    "StateError",
    "Stats",
    "Traffic",
    "Trainer",
    "TrainerStatus",
    "Why",
    "__version__",
    "attach",
    "codecs",
    "connect",
    "exchanges",
    "formats",
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
