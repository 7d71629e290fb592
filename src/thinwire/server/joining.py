"""Who may join: both sides prove that they know the secret, then they compare what they are about to train.

The trainer sends GREETING and a nonce; the server answers with the same and a nonce of its own. Each then sends an
HMAC-SHA-256 of both nonces and its role, keyed with the secret: the trainer first, so a stranger learns nothing from
the server. All of it has a fixed length. Nothing after that is authenticated or encrypted.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
import time
from collections.abc import Mapping, Sequence

from thinwire.codecs import Codec
from thinwire.errors import ServerError
from thinwire.reducer import Reducer
from thinwire.reducer.base import words
from thinwire.server.frames import PROTOCOL, Wire
from thinwire.server.layout import Entry

VARIABLE = "THINWIRE_SECRET"
GREETING = b"thinwire server " + PROTOCOL.to_bytes(4, "little")
PATIENCE = 10.0
"""Seconds that either side waits for each of the other's words."""

_NONCE, _PROOF = 32, 32
_YES, _NO = b"\1", b"\0"


class StrangerError(ConnectionError):
    """Whoever connected is no trainer of ours."""


def secret_of(given: str | None, host: str) -> bytes:
    """Return the secret: what was given, or the environment's. Raises ValueError if a public `host` has none."""
    found = os.environ.get(VARIABLE, "") if given is None else given
    if not found and not _is_loopback(host):
        raise ValueError(
            f"the server listens on {host!r}, where others can reach it, and has no secret: pass secret=, or set "
            f"{VARIABLE} on the server and on every trainer (python -c 'import secrets; print(secrets.token_hex())')"
        )
    return found.encode()


def challenge(wire: Wire, secret: bytes) -> None:
    """Do the server's part. Raises StrangerError for whoever does not know the secret, and GoneError."""
    theirs, mine = _read(wire, len(GREETING) + _NONCE), secrets.token_bytes(_NONCE)
    if not hmac.compare_digest(theirs[: len(GREETING)], GREETING):
        raise StrangerError("it sent something else than the greeting of this version of thinwire")
    both = theirs[len(GREETING) :] + mine
    wire.send_raw(GREETING + mine)
    if not hmac.compare_digest(_read(wire, _PROOF), _proof(secret, b"trainer", both)):
        wire.send_raw(_NO)
        raise StrangerError("it does not know the secret")
    wire.send_raw(_YES + _proof(secret, b"server", both))


def respond(wire: Wire, secret: bytes, address: str) -> None:
    """Do the trainer's part. Raises ServerError if the two do not have the same secret, and GoneError."""
    mine = secrets.token_bytes(_NONCE)
    wire.send_raw(GREETING + mine)
    theirs = _read(wire, len(GREETING) + _NONCE)
    if theirs[: len(GREETING)] != GREETING:
        raise ServerError(f"{address} answers {theirs[:20]!r}; expected a server of thinwire, protocol {PROTOCOL}")
    both = mine + theirs[len(GREETING) :]
    wire.send_raw(_proof(secret, b"trainer", both))
    if _read(wire, 1) != _YES:
        raise ServerError(f"{address} has another secret: pass the server's as secret=, or set {VARIABLE} to it")
    if not hmac.compare_digest(_read(wire, _PROOF), _proof(secret, b"server", both)):
        raise ServerError(f"{address} does not know the secret, so it is not the server that it should be")


def difference(server: Mapping[str, object], trainer: Mapping[str, object]) -> str | None:
    """Return in words the first thing in which the two differ, and what to do; None if they agree."""
    for key in {**server, **trainer}:
        mine, theirs = server.get(key, "absent"), trainer.get(key, "absent")
        if mine != theirs:
            return f"{key} differs: the server has {mine}, this trainer has {theirs}; give both the same"
    return None


def agreed(
    recipe: Reducer,
    down: Codec | None,
    parameters: Sequence[Entry],
    servers: int,
    index: int,
    *,
    fetch_rows: bool = False,
    frozen: str = "none",
) -> dict[str, str]:
    """Return in words what a server and its trainers must have in common; `frozen` as `layout.frozen` returns it."""
    return {
        "recipe": words(recipe),
        "down": words(down),
        "fetch_rows": str(fetch_rows),
        "what is frozen (its hash)": frozen,
        "the place among the servers": f"{index} of {servers}",
    } | {f"parameter {each.name}": str(each) for each in parameters}


def _proof(secret: bytes, role: bytes, both: bytes) -> bytes:
    return hmac.new(secret, role + both, hashlib.sha256).digest()


def _read(wire: Wire, count: int) -> bytes:
    into = bytearray(count)
    wire.receive_raw(memoryview(into), deadline=time.monotonic() + PATIENCE)
    return bytes(into)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
