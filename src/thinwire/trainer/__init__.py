"""Trainers: each computes gradients on a copy of the parameters, and servers apply them.

Of each server, `uplink` encodes, `channel` sends what its `log` has and takes answers into `copy` and `fetched`.
"""

from thinwire.trainer.connecting import connect
from thinwire.trainer.trainer import Traffic, Trainer

__all__ = ["Traffic", "Trainer", "connect"]
