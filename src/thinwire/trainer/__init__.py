"""Trainers: each computes gradients on a copy of the parameters, and servers apply them.

Of each server, `channel` logs and sends updates, and takes in the answers; `contents` encodes and reads them.
"""

from thinwire.trainer.trainer import Traffic, Trainer, connect

__all__ = ["Traffic", "Trainer", "connect"]
