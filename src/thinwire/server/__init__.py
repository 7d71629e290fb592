"""Asynchronous training on parameter servers: `serve` keeps the parameters, trainers `connect` and send updates.

`hub` receives, and says what is in `answers`; `central` applies updates when `rule` allows it; `saving` writes
checkpoints. Trainers are in `thinwire.trainer`, what both share is in `thinwire.wire`.

Each update is applied once, also by a server that has gone back to its checkpoint. That holds, beside the parameters,
the number of each trainer's latest update in them (`Central.applied`), and the answer to JOIN says it. Trainers keep
the packed bytes of every update in a log (`Channel._log`) until the server has saved it, and send again what it lacks.
"""

from thinwire.server.answers import ServerStatus, TrainerStatus
from thinwire.server.server import Server, serve
from thinwire.trainer import Traffic, Trainer, connect

__all__ = ["Server", "ServerStatus", "Traffic", "Trainer", "TrainerStatus", "connect", "serve"]
