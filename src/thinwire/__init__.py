"""thinwire: distributed training over slow links: send less, with error feedback.

import thinwire as tw
tw.attach(ddp_model, tw.recipes.topk(density=0.01))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from thinwire.handle import Handle
from thinwire.integrations import Checkpoint, attach, outer, plan, profile, redistribute, replicate, scatter, shard
from thinwire.outer_steps import OuterSteps
from thinwire.planner import Budget
from thinwire.trainer import connect
from thinwire.version import __version__ as __version__

if TYPE_CHECKING:
    from thinwire import server as server
    from thinwire.server import serve

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


def __getattr__(name: str) -> Any:
    """Load the server when it is asked for: trainers need nothing of it."""
    if name not in ("serve", "server"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = import_module("thinwire.server")
    return found if name == "server" else found.serve
