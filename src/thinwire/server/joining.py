"""Who may join: both sides prove that they know the secret, then they compare what they are about to train.

The trainer sends GREETING and a nonce; the server answers with the same and a nonce of its own. Each then sends an
HMAC-SHA-256 of both nonces and its role, keyed with the secret: the trainer first, so a stranger learns nothing from
the server. All of it has a fixed length. Nothing after that is authenticated or encrypted. A refused trainer is told
which setting differs, and not the server's value: the server logs that.

Servers at localhost have a secret by default: one for each user of a host, in a file that nobody else may read.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Self, final

from torch import nn

from thinwire.checked import BODY
from thinwire.codecs import Codec
from thinwire.errors import ServerError
from thinwire.reducer import Reducer
from thinwire.reducer.base import words
from thinwire.server.frames import PROTOCOL, Wire
from thinwire.server.layout import Entry, Layout, entries, frozen, shards

Secret = Annotated[str | None, BODY]
"""A secret, which no error may show."""
VARIABLE = "THINWIRE_SECRET"
GREETING = b"thinwire server " + PROTOCOL.to_bytes(4, "little")
PATIENCE = 10.0
"""Seconds that either side waits for each of the other's words."""

_NONCE, _PROOF = 32, 32
_YES, _NO = b"\1", b"\0"
_LEAST, _SHOWN = 16, 400  # characters of a secret, at least; of a difference, at most
_MAKE = "python -c 'import secrets; print(secrets.token_hex())'"


class StrangerError(ConnectionError):
    """The other side is not a trainer of this server."""


def given_secret(secret: Secret) -> str | None:
    """Return the secret that was given, or the environment's. Raises TypeError or ValueError, which do not show it."""
    found = os.environ.get(VARIABLE) or None if secret is None else secret
    if found is not None and not isinstance(found, str):
        raise TypeError(f"secret is of type {type(found).__name__}; expected a str, or None")
    if found is not None and len(found) < _LEAST:
        raise ValueError(f"the secret is too short; expected {_LEAST} characters or more: make one with {_MAKE}")
    return found


def secret_of(given: str | None, host: str) -> bytes:
    """Return the secret for a server: given, or at localhost this user's own; ValueError if a public one has none."""
    if given is not None:
        return given.encode()
    if _is_loopback(host):
        return _own_secret()
    raise ValueError(
        f"the server is at {host!r}, where others can reach it, and has no secret: pass secret=, or set "
        f"{VARIABLE} on the server and on every trainer ({_MAKE})"
    )


def _own_secret() -> bytes:
    """Return the secret of this user's servers at localhost, and make it if there is none."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire" / "secret"
    try:
        if not path.exists():
            _make_secret(path)
        found = path.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's alone: delete it")
        return path.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise ValueError(
            f"no secret was given, and this user's file of it cannot be read or made ({error}): pass secret=, or set "
            f"{VARIABLE}"
        ) from error


def _make_secret(path: Path) -> None:
    """Write a new secret to `path`, whole and readable for this user alone, unless another process is faster."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    beside.touch(mode=0o600, exist_ok=False)
    beside.write_text(secrets.token_hex())
    with suppress(FileExistsError):
        os.link(beside, path)
    beside.unlink()


def challenge(wire: Wire, secret: bytes) -> None:
    """Do the server's part. Raises StrangerError for a client without the secret, and GoneError."""
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


class Difference(NamedTuple):
    """In what a server and a trainer differ: as the trainer is told, and as the server logs it."""

    told: str
    logged: str


def difference(server: Mapping[str, str], trainer: Mapping[str, str]) -> Difference | None:
    """Return the first thing in which the two differ, and what to do; None if they agree."""
    for key in {**server, **trainer}:
        mine, theirs = server.get(key, "absent"), trainer.get(key, "absent")
        if mine != theirs:
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
            start = max(0, same - _SHOWN // 2)
            it = f"{key} differs: this trainer has {_cut(theirs)}" if key in trainer else "this trainer lacks something"
            return Difference(
                f"{it}; give it the same as the server, whose log says what that is",
                f"{key} differs: the server has {_cut(mine, start)}, this trainer has {_cut(theirs, start)}",
            )
    return None


def _cut(text: str, start: int = 0) -> str:
    return f"{'… ' * bool(start)}{text[start : start + _SHOWN]}{' …' * (len(text) > start + _SHOWN)}"


@final
@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a server and its trainers must have in common: of which model, and how updates and answers are encoded.

    `parameters` are those of each server. `frozen` is a hash of what is not trained.
    """

    recipe: Reducer
    down: Codec | None
    fetch_rows: bool
    parameters: Sequence[Sequence[Entry]]
    frozen: str = "none"

    @classmethod
    def of(cls, model: nn.Module, recipe: Reducer, down: Codec | None, *, servers: int, fetch_rows: bool) -> Self:
        """Return those of this model. Raises ValueError for rows to fetch of one without, and for too many servers."""
        parameters = entries(model)
        if fetch_rows and not any(each.rows for each in parameters):
            raise ValueError(
                "fetch_rows=True, and the model has no rows to fetch: make its embeddings with sparse=True, or drop it"
            )
        parts = shards(parameters, servers)
        return cls(recipe=recipe, down=down, fetch_rows=fetch_rows, parameters=parts, frozen=frozen(model))

    def layout(self, index: int) -> Layout:
        """Return the layout of a server's parameters, ready for use. Raises TypeError for a recipe without codec."""
        made = Layout(self.parameters[index], fetch_rows=self.fetch_rows)
        made.check(self.recipe)
        made.compile(self.recipe, self.down)
        return made

    def agreed(self, index: int) -> dict[str, str]:
        """Return them in words, for the server of this number."""
        return {
            "recipe": words(self.recipe),
            "down": words(self.down),
            "fetch_rows": str(self.fetch_rows),
            "what is frozen (its hash)": self.frozen,
            "the place among the servers": f"{index} of {len(self.parameters)}",
        } | {f"parameter {each.name}": str(each) for each in self.parameters[index]}


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
