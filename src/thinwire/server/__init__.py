"""Asynchronous training on parameter servers: `serve` keeps the parameters, trainers `connect` and send updates.

`frames` and `joining` are the conversation, `layout` and `exchange` what it carries, `central`, `rules`, `session` and
`serving` the server, `channel` and `trainer` the other side.
"""

from thinwire.server.serving import Server, Standing, serve
from thinwire.server.trainer import Traffic, Trainer, connect

__all__ = ["Server", "Standing", "Traffic", "Trainer", "connect", "serve"]
