"""The parameter server: `serve`, from what the user gives to a server at work; what is done now and then; its end."""

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import final

import torch
from torch import nn

from thinwire.checked import Count, Positive, Size, checked
from thinwire.codecs import Codec
from thinwire.errors import MomentumError
from thinwire.memories import MomentumCorrection
from thinwire.outer_steps import MakeOptimizer
from thinwire.reducer import Reducer
from thinwire.server.answers import ServerStatus
from thinwire.server.central import Central, MakeScheduler
from thinwire.server.hub import Hub
from thinwire.server.rule import Rule
from thinwire.server.saving import Saving
from thinwire.waits import all_finite
from thinwire.wire.layout import layouts
from thinwire.wire.rendezvous import announce, key_of, leave, place
from thinwire.wire.sockets import TICK, Listener, check_installed, split

logger = logging.getLogger("thinwire")


@final
class Server(AbstractContextManager["Server"]):
    """A running parameter server, which `serve` makes: use it as a context manager, or call `close`."""

    def __init__(self, hub: Hub, address: str, *, ticket: str, every: float, ending: ExitStack) -> None:
        self.address = address
        """Where it listens, as host:port."""
        self.ticket = ticket
        """What lets a trainer join: `connect(..., ticket=)`. Whoever has it can join, so keep it secret."""
        self._hub, self._every, self._ending, self._closing = hub, every, ending, threading.Event()
        self._process = os.getpid()
        self._threads = [threading.Thread(target=job, daemon=True) for job in (self._hub.run, self._keep_saving)]
        for each in self._threads:
            each.start()

    def status(self) -> ServerStatus:
        """Return the server's current status; while its optimizer steps, as it was before."""
        held = self._hub.lock.acquire(timeout=TICK)  # a step has the lock, however long it takes
        try:
            return self._hub.status()
        finally:
            if held:
                self._hub.lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until as many trainers as expected have joined and all have left, or until `close`.

        A trainer that vanished without calling `close` has `timeout` seconds to come back (no limit before the first
        update). After a restart from a checkpoint, all trainers have `timeout` seconds.

        Args:
            seconds: How long to wait at most; by default without limit.

        Returns:
            Whether they have.

        Raises:
            ServerError: If an optimizer or scheduler has raised: no further updates are applied or saved.
        """
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        with self._hub.lock:
            while not (done := self._hub.ended) and time.monotonic() < end and not self._closing.is_set():
                self._hub.central.check()
                self._hub.lock.wait(min(0.5, max(0.0, end - time.monotonic())))
            self._hub.central.check()
        return done

    def save(self) -> None:
        """Save now.

        Raises:
            ValueError: Without a checkpoint.
            OSError: If it cannot be written.
        """
        self._hub.saving.save()
        self._hub.tell()

    def close(self) -> None:
        """Stop, after the step in progress: close all connections, and save if there is a checkpoint.

        Raises:
            OSError: If it cannot be written. Everything else is done; make room and call `save`.
        """
        if self._closing.is_set() or os.getpid() != self._process:  # a forked child shares its files
            return
        self._closing.set()
        with self._ending:  # whatever is raised
            self._hub.saving.soon.set()
            self._hub.close()
            for each in self._threads:
                each.join()
            if self._hub.saving.durable is not None and not self._hub.central.failure:
                self.save()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_saving(self) -> None:
        saving = self._hub.saving
        while not self._closing.is_set():
            asked = saving.soon.wait(min(self._every, threading.TIMEOUT_MAX))
            saving.soon.clear()
            if saving.durable is None or self._closing.is_set() or self._hub.central.failure:
                continue
            try:
                self.save()
            except Exception as error:  # whatever it is, or nothing would be saved any more
                logger.error("the checkpoint could not be saved: %s. Trainers keep their updates", error)
                self._closing.wait(1.0)
                if asked:  # who did still waits
                    saving.soon.set()


@checked
def serve(
    model: nn.Module,
    recipe: Reducer,
    *,
    make_optimizer: MakeOptimizer,
    make_rows_optimizer: MakeOptimizer | None = None,
    make_scheduler: MakeScheduler | None = None,
    address: str | None = None,
    key: str | os.PathLike[str] | None = None,
    servers: Count = 1,
    index: Size | None = None,
    trainers: Count = 1,
    staleness: Size | None = None,
    damped: bool = False,
    down: Codec | None = None,
    fetch_rows: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    every: Positive = 30.0,
    timeout: Positive = 30.0,
) -> Server:
    """Serve a model's parameters to trainers that `connect`, until `close`; it works in threads of its own.

    Args:
        model: The same as the trainers'. Its parameters are the central copy from now on; of several servers, each has
            some of them. Buffers, such as running means, stay with each trainer.
        recipe: How trainers compress. Trainers need the same recipe, `down` and `fetch_rows`. Its exchange is not used.
        make_optimizer: Called with the parameters, returns their optimizer.
        make_rows_optimizer: The same for the parameters of sparse embeddings.
        make_scheduler: Called with each optimizer, returns a scheduler that steps with it.
        address: host:port to listen at; port 0 picks a free one. Under torchrun the default is a free port on
            localhost, which trainers find by themselves.
        key: A file with the server's key, created if it does not exist, with the trainers' ticket beside it:
            `key`.ticket. By default `checkpoint`.key; without a checkpoint, a new key at each start. Trainers of this
            user on this host, and those of a torchrun job, find the ticket; pass it to others.
        servers: How many servers share the parameters.
        index: Which of them this is; by default the rank.
        trainers: How many must have joined before the first update is applied. A trainer that was restarted counts
            once.
        staleness: By how many updates a trainer may be ahead of the slowest; at 0 the server waits for one update from
            every trainer, and takes one step with their mean; None sets no bound.
        damped: Whether to multiply an update of staleness τ by 1/(1 + τ).
        down: How the server compresses what has changed, with error feedback; None sends all parameters in full.
        fetch_rows: Whether rows of sparse embeddings are left out of answers; trainers ask for those that they need.
        checkpoint: A file to save to, and to resume from if it exists; each server has its own. A learning rate that
            `make_optimizer` has changed holds; schedules go on in proportion, and all other settings are as saved.
        every: Seconds between saves.
        timeout: Seconds of silence after which a trainer counts as gone. When the server has waited for this long, the
            log names the trainers it waits for.

    Returns:
        The server, which already listens at its `address`. A context manager, which closes it.

    Raises:
        ImportError: Without pyzmq.
        ValueError: For a model that is not on the CPU, not finite, complex, has no rows to fetch or is already in use
            in this process, a key that others may read, or an optimizer that moves rows without a gradient.
        MomentumError: If momentum would be applied twice.
        TypeError: For a recipe without memory and codec, or a scheduler that needs metrics.
        StateError: For a checkpoint that does not fit or is damaged.
        OSError: If the address is taken or the checkpoint cannot be written.

    Example:
        >>> recipe = tw.recipes.topk(density=0.01)
        >>> server = tw.serve(nn.Linear(64, 64), recipe, make_optimizer=torch.optim.SGD, address="localhost:0")
        >>> server.close()
    """
    check_installed()
    here, door = place(index, servers, address), address or "127.0.0.1:0"
    split(door)
    layout = layouts(model, recipe, down, servers=servers, fetch_rows=fetch_rows)[here]
    if others := {str(p.device) for p in model.parameters()} - {"cpu"}:
        raise ValueError(f"the model to serve is on {others.pop()}; expected the CPU: call model.cpu() first")
    with ExitStack() as ending:
        ending.enter_context(layout.claimed(model))
        central = Central(model, layout, make_optimizer, make_rows_optimizer, make_scheduler, damped=damped)
        _check_momentum(recipe, central.optimizers)
        lock = threading.Condition(threading.RLock())
        saving = Saving(central, lock, checkpoint)
        if bad := next((name for name, p in central.parameters.items() if not all_finite([p.detach()])), None):
            raise ValueError(f"{bad} is not finite: initialise it, or load it, before serve")
        own = key_of(Path(key) if key else Path(f"{os.fspath(checkpoint)}.key") if checkpoint else None)
        listener = Listener(door, own, timeout=timeout, longest=layout.messages)
        ending.callback(listener.close)
        ticket = own.ticket.text
        ending.callback(leave(listener.address, ticket))
        if not ip_address(split(listener.address)[0]).is_loopback:
            announce("ticket", here, ticket)
        if address is None:
            announce("address", here, listener.address)
        layout.compile()  # a minute where nothing is cached: trainers wait for the address no longer than `timeout`
        rule = Rule(central, trainers=trainers, timeout=timeout, staleness=staleness)  # whose time begins now
        hub = Hub(listener, central, rule, saving, lock)
        return Server(hub, listener.address, ticket=ticket, every=every, ending=ending.pop_all())


def _check_momentum(recipe: Reducer, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    corrects = any(isinstance(part, MomentumCorrection) for each in recipe.memories() for part in each.parts)
    for each in optimizers if corrects else ():
        if any(group.get("momentum") or "betas" in group for group in each.param_groups):
            raise MomentumError(
                f"the recipe applies momentum on the trainers, and {type(each).__name__} would again: "
                "give serve an SGD without momentum, or a recipe with plain error feedback"
            )
