"""Memories: the residual, which is what has not been sent yet and waits for a later step."""

from thinwire.memories.base import Memory, NoMemory
from thinwire.memories.error_feedback import ErrorFeedback
from thinwire.memories.fading_momentum import AppliedMomentum, FadingMomentum
from thinwire.memories.momentum_correction import MomentumCorrection
from thinwire.memories.noted import Noted
from thinwire.memories.orthogonal_momentum import OrthogonalMomentum

__all__ = [
    "AppliedMomentum",
    "ErrorFeedback",
    "FadingMomentum",
    "Memory",
    "MomentumCorrection",
    "NoMemory",
    "Noted",
    "OrthogonalMomentum",
]
