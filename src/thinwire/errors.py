"""The errors that callers may want to tell apart."""


class PayloadError(ValueError):
    """A buffer is not the payload that was expected. Nothing has been written."""


class FingerprintError(RuntimeError):
    """Ranks attached different recipes or different models."""


class StateError(RuntimeError):
    """The loaded or saved states do not match, or cannot be read."""


class MomentumError(ValueError):
    """With this optimizer, momentum would be applied twice or not at all."""


class ServerError(ConnectionError):
    """The parameter server is gone, or does not let this trainer in."""
