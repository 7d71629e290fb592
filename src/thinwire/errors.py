"""Errors a caller can tell apart."""


class PayloadError(ValueError):
    """A buffer is not the payload it should be; nothing was written."""


class FingerprintError(RuntimeError):
    """Ranks attached different recipes or different models."""


class StateError(RuntimeError):
    """Ranks would go on from different states."""


class MomentumError(ValueError):
    """Momentum would be applied twice, or not at all."""
