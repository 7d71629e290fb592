"""Asynchronous training on parameter servers: `serve` keeps the parameters, trainers `connect` and send updates.

`frames` and `joining` are the conversation, `layout`, `exchange` and `fetching` what it carries, `central`, `rules`,
`session` and `serving` the server, `asking`, `channel`, `trainer` and `connecting` the other side. `places` is where
either has its parameters.
"""

from thinwire.server.connecting import connect
from thinwire.server.server import Server
from thinwire.server.serving import serve
from thinwire.server.status import ServerStatus, TrainerStatus
from thinwire.server.trainer import Traffic, Trainer

__all__ = ["Server", "ServerStatus", "Traffic", "Trainer", "TrainerStatus", "connect", "serve"]
