"""Payloads: what travels between ranks."""

from thinwire.payloads.base import Payload
from thinwire.payloads.dense import Dense
from thinwire.payloads.sparse import Sparse

__all__ = ["Dense", "Payload", "Sparse"]
