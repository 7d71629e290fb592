"""Asynchronous training on parameter servers: `serve` keeps the parameters, trainers `connect` and send updates.

`hub` receives, and says what is in `answers`; `central` applies updates when `rule` allows it; `saving` writes
checkpoints. Trainers are in `thinwire.trainer`, what both share is in `thinwire.wire`.
"""

from thinwire.server.answers import ServerStatus, TrainerStatus
from thinwire.server.server import Server, serve
from thinwire.trainer import Traffic, Trainer, connect

__all__ = ["Server", "ServerStatus", "Traffic", "Trainer", "TrainerStatus", "connect", "serve"]
