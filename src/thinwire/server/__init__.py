"""Asynchronous training on parameter servers: `serve` keeps the parameters, trainers `connect` and send updates.

`frames` and `joining` are the conversation, `layout` and `exchange` what it carries, `central`, `rules`, `session` and
`serving` the server, `channel` and `trainer` the other side.
"""

from thinwire.server.server import Server
from thinwire.server.serving import serve
from thinwire.server.status import ServerStatus, TrainerStatus
from thinwire.server.trainer import Traffic, Trainer, connect

__all__ = ["Server", "ServerStatus", "Traffic", "Trainer", "TrainerStatus", "connect", "serve"]
