"""The parameter server: it accepts trainers, and saves what it has."""

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import nn

from thinwire.checked import Count, Positive, Size, checked
from thinwire.codecs import Codec
from thinwire.errors import MomentumError, PayloadError
from thinwire.memories import MomentumCorrection
from thinwire.reducer import Reducer
from thinwire.reducer.base import words
from thinwire.server.central import Central, MakeOptimizer, MakeScheduler
from thinwire.server.durable import Durable
from thinwire.server.environment import announce, joint, place, split
from thinwire.server.exchange import check_memories
from thinwire.server.frames import FrameError, GoneError
from thinwire.server.joining import StrangerError, secret_of
from thinwire.server.layout import Entry, entries, shards
from thinwire.server.rules import Asynchronous, Rule, Synchronous
from thinwire.server.session import RefusedError, Session, Shared

logger = logging.getLogger("thinwire")
_STRANGERS = 64  # that may be at the door at one time


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a server stands.

    version: steps of its optimizer. staleness: how many updates were applied by how many steps they were behind.
    updates: the number of each trainer's latest update, by trainer. trainers: those that are connected. dropped: how
    many updates were not finite. sent_bytes, received_bytes: over all connections, headers included.
    """

    version: Size
    staleness: Mapping[Size, Size]
    updates: Mapping[str, Size]
    trainers: Sequence[str]
    dropped: Size
    sent_bytes: Size
    received_bytes: Size


@final
@checked
class Server:
    """A parameter server at work; `serve` makes one. Use it as a context, or call `close`."""

    def __init__(
        self, shared: Shared, listener: socket.socket, *, address: str, durable: Durable | None, every: Positive
    ) -> None:
        self._shared, self._listener, self._durable = shared, listener, durable
        self._address, self._every = address, every
        self._closing, self._saving = threading.Event(), threading.Event()
        self._saved = dict(shared.central.applied)
        self._counted, self._met = [0, 0], set[str]()
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._threads: set[threading.Thread] = set()
        shared.durable, shared.save_soon = self._durable_of, self._saving.set

    def start(self) -> None:
        """Begin to let trainers in, and to save. `serve` has done so."""
        for job in (self._accept, self._keep_saving, self._keep_pinging):
            thread = threading.Thread(target=job, daemon=True)
            self._threads.add(thread)
            thread.start()

    @property
    def address(self) -> str:
        """Where it listens, as host:port."""
        return self._address

    def standing(self) -> Standing:
        """Return where it stands now."""
        shared = self._shared
        with shared.lock:
            wires = [session.wire for session in shared.sessions.values()]
            return Standing(
                version=shared.central.version,
                staleness=dict(shared.central.staleness),
                updates=dict(shared.central.applied),
                trainers=tuple(shared.sessions),
                dropped=shared.central.dropped,
                sent_bytes=self._counted[0] + sum(wire.sent for wire in wires),
                received_bytes=self._counted[1] + sum(wire.received for wire in wires),
            )

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until as many trainers as expected have joined and all have left. Return whether that is so.

        One that is gone without a goodbye has `timeout` seconds to come back.
        """
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        with self._shared.lock:
            while not (done := self._all_left()) and time.monotonic() < end:
                self._shared.lock.wait(min(0.5, max(0.0, end - time.monotonic())))
        return done

    def save(self) -> None:
        """Save now. Raises ValueError without a checkpoint, and OSError where the disk refuses."""
        if self._durable is None:
            raise ValueError("this server has no checkpoint: pass checkpoint= to serve")
        with self._shared.lock:
            state = self._shared.central.state()
        self._durable.save(state)
        with self._shared.lock:
            self._saved = state["applied"]
            sessions = list(self._shared.sessions.values())
        for session in sessions:
            _told(session)

    def close(self) -> None:
        """Stop: let all trainers go, and save if there is a checkpoint."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._saving.set()
        _shut(self._listener)
        with self._shared.lock:
            self._shared.rule.stop()
            for session in self._shared.sessions.values():
                session.wire.close()
        for each in list(self._threads):
            each.join(self._shared.timeout)
        if self._durable is not None:
            self.save()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all_left(self) -> bool:
        away = time.monotonic() - self._shared.lost
        return self._shared.rule.complete and not self._shared.sessions and away > self._shared.timeout

    def _durable_of(self, trainer: str) -> int:
        """Return a trainer's latest update that will outlive this server; without a checkpoint, none has to."""
        held = self._shared.central.applied if self._durable is None else self._saved
        return held.get(trainer, 0)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError:
                if not self._closing.is_set():
                    time.sleep(0.1)  # out of descriptors, perhaps
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(target=self._converse, args=(connection, str(peer[0])), daemon=True)
            self._threads.add(thread)
            thread.start()

    def _converse(self, connection: socket.socket, host: str) -> None:
        session, inside = Session(connection, self._shared), threading.Event()

        def let_in() -> None:
            inside.set()
            self._strangers.release()

        try:
            session.run(let_in)
        except GoneError as error:
            logger.info("trainer %s at %s is gone: %s", session.trainer[:8], host, error)
        except RefusedError as error:
            logger.warning("a trainer at %s was refused: %s", host, error)
        except (StrangerError, FrameError, PayloadError) as error:
            self._report(host, error)
        finally:
            if not inside.is_set():
                self._strangers.release()
            with self._shared.lock:
                self._counted[0] += session.wire.sent
                self._counted[1] += session.wire.received
            self._threads.discard(threading.current_thread())

    def _report(self, host: str, error: Exception) -> None:
        """Log once for each address."""
        with self._shared.lock:
            known = host in self._met or len(self._met) >= 1024
            self._met.add(host) if not known else None
        if not known:
            logger.warning("closed a connection from %s: %s. Further ones from there are not logged", host, error)

    def _keep_pinging(self) -> None:
        """Let trainers know that the server is there, whatever their sessions wait for or compute."""
        while not self._closing.wait(self._shared.timeout / 4):
            with self._shared.lock:
                sessions = list(self._shared.sessions.values())
            for session in sessions:
                _told(session)

    def _keep_saving(self) -> None:
        while not self._closing.is_set():
            self._saving.wait(self._every)
            self._saving.clear()
            if self._durable is not None and not self._closing.is_set():
                try:
                    self.save()
                except OSError as error:
                    logger.error("the checkpoint could not be saved: %s. Trainers keep their updates", error)
                    self._closing.wait(1.0)


def agreed(
    recipe: Reducer, down: Codec | None, parameters: Sequence[Entry], servers: int, index: int
) -> dict[str, str]:
    """Return in words what a server and its trainers must have in common."""
    return {
        "recipe": words(recipe),
        "down": words(down),
        "the place among the servers": f"{index} of {servers}",
    } | {f"parameter {each.name}": str(each) for each in parameters}


@checked
def serve(
    model: nn.Module,
    recipe: Reducer,
    *,
    optimizer: MakeOptimizer,
    rows_optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    address: str | None = None,
    secret: str | None = None,
    servers: Count = 1,
    index: Size | None = None,
    trainers: Count = 1,
    staleness: Size | None = None,
    damped: bool = False,
    down: Codec | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: Positive = 30.0,
    timeout: Positive = 30.0,
) -> Server:
    """Serve a model's parameters to trainers that `connect`, until `close`. It works in threads of its own.

    model: the same as the trainers'. Its parameters are the central copy from now on; of several servers, each has some
    of them. Buffers, such as running means, stay with each trainer.
    recipe: how trainers compress. Its memory and codec are used, and not its exchange. down: how the server compresses
    what has changed; None sends all parameters in full. Both must be the trainers'.
    optimizer: called with the parameters, returns their optimizer; `rows_optimizer` does so for those of sparse
    embeddings, `scheduler` is called with each optimizer and steps with it.
    address: host:port to listen at; port 0 takes a free one. Under torchrun the default is a free port at localhost,
    which trainers find by themselves. secret: what trainers must know; by default THINWIRE_SECRET. Beyond localhost
    there must be one.
    servers, index: among how many servers the parameters are divided, and which of them this is: by default the rank.
    trainers: how many must have joined before the first update is applied.
    staleness: by how many updates a trainer may be ahead of the slowest; at 0 one update of each makes one step, of
    their mean; None lets each go at its own pace. damped: multiply an update of staleness τ by 1/(1 + τ).
    checkpoint: a file to save to, every `every` seconds, and to resume from if it is there.
    timeout: seconds of silence after which a trainer is taken for gone.

    Raises ValueError for a model that is not on the CPU, a public address without a secret, or an optimizer that moves
    rows without a gradient; MomentumError if momentum would be applied twice, TypeError for a recipe without memory and
    codec, StateError for a checkpoint of something else, and OSError if the address is taken.
    """
    here = place(index, servers)
    check_memories(recipe)
    host, port = split(address or "127.0.0.1:0")
    known = secret_of(secret, host)
    mine = shards(entries(model), servers)[here]
    if others := {str(p.device) for p in model.parameters()} - {"cpu"}:
        raise ValueError(f"the model to serve is on {others.pop()}; expected the CPU: call model.cpu() first")
    central = Central(
        model, mine, optimizer=optimizer, rows_optimizer=rows_optimizer, scheduler=scheduler, damped=damped
    )
    _check_momentum(recipe, central.optimizers)
    central.layout.check(recipe)
    central.layout.compile(recipe, down)
    durable = None if checkpoint is None else Durable(checkpoint)
    if durable is not None:
        durable.load(central.restore)
    lock = threading.Condition(threading.RLock())
    shared = Shared(
        central=central,
        rule=_rule(central, lock, staleness, trainers=trainers, tick=timeout / 4),
        lock=lock,
        recipe=recipe,
        codec=down,
        secret=known,
        timeout=timeout,
        agreed=agreed(recipe, down, mine, servers, here),
        durable=lambda trainer: 0,
        save_soon=lambda: None,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    at, free = listener.getsockname()[:2]
    server = Server(shared, listener, address=joint(at, free), durable=durable, every=every)
    server.start()
    if address is None:
        announce(here, server.address)
    return server


def _rule(central: Central, lock: threading.Condition, staleness: int | None, *, trainers: int, tick: float) -> Rule:
    if staleness == 0:
        return Synchronous(central, lock, trainers=trainers, tick=tick)
    return Asynchronous(central, lock, trainers=trainers, tick=tick, bound=staleness)


def _check_momentum(recipe: Reducer, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise MomentumError if both the recipe and an optimizer have momentum."""
    corrects = any(isinstance(part, MomentumCorrection) for each in recipe.memories() for part in each.parts)
    for each in optimizers if corrects else ():
        if any(group.get("momentum") or "betas" in group for group in each.param_groups):
            raise MomentumError(
                f"the recipe applies momentum on the trainers, and {type(each).__name__} would again: "
                "give serve an SGD without momentum, or a recipe with plain error feedback"
            )


def _told(session: Session) -> None:
    with suppress(GoneError):  # its own thread will notice
        session.ping()


def _shut(listener: socket.socket) -> None:
    """Close a listening socket, so that whoever waits in accept returns."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
