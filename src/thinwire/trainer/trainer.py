"""A trainer: `connect` makes it; it computes gradients on its own copy of the parameters, and servers apply them."""

import copy
import logging
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import repeat
from typing import final
from weakref import WeakKeyDictionary, WeakSet, finalize

from torch import Tensor, nn

from thinwire.checked import Count, Positive, Seconds, Size, Whole, checked
from thinwire.codecs import Codec
from thinwire.errors import StateError
from thinwire.handle import MemoryUse
from thinwire.interrupts import untorn
from thinwire.reducer import Reducer
from thinwire.trainer.channel import Channel, Settings, Shared
from thinwire.trainer.contents import Base, drainable, wanted
from thinwire.waits import all_finite, refuse_unfit
from thinwire.wire.frames import Bytes, Flag
from thinwire.wire.layout import layouts
from thinwire.wire.parameters import claimed, named
from thinwire.wire.rendezvous import Given, addresses, said
from thinwire.wire.sections import pack
from thinwire.wire.sockets import check_installed

logger = logging.getLogger("thinwire")
_BEARABLE = 20  # steps in a row whose gradients are not finite: a loss scale has come down by then
Work = Callable[[nn.Module], None]


@final
@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a trainer has sent and received.

    Args:
        updates: How many it sent.
        saved: The number of the latest update that all servers have on disk (or, without a checkpoint, have applied).
        skipped: Steps whose gradients were not finite, of which nothing was sent.
        dropped: Updates that a server found not to be finite.
        drained: Updates that were uncompressed and emptied the residual.
        sent_bytes, received_bytes: Headers included.
        fetched_rows: Rows of sparse embeddings that it asked for and got, repeats included.
        waited: Seconds that threads waited for answers, added up.
    """

    updates: int
    saved: int
    skipped: int
    dropped: int
    drained: int
    sent_bytes: int
    received_bytes: int
    fetched_rows: int
    waited: float


@final
class Trainer(AbstractContextManager["Trainer"]):
    """A trainer, as returned by `connect`: use it as a context manager, or call `close`."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Reducer,
        channels: Sequence[Channel],
        ending: ExitStack,
        *,
        drain: int | None,
        seed: int,
        in_flight: int,
    ) -> None:
        self.model, self._recipe, self._channels, self._in_flight = model, recipe, channels, in_flight
        self._drain_every, self._chance = drain, random.Random(seed)
        self._ending, self._lock = ending, threading.Lock()
        self._number = self._skipped = self._in_a_row = self._drained = 0
        self._waited = 0.0
        self._begun = WeakKeyDictionary[nn.Module, list[Base]]()
        """The versions that each replica's next gradient will have been computed on, at least."""
        self._interrupted = WeakSet[nn.Module]()
        (forgotten := finalize(self, _leave, ending)).atexit = False
        ending.callback(forgotten.detach)

    def step(self, module: nn.Module | None = None, *, loss: float | Tensor | None = None) -> bool:
        """Send the gradients of the model, or of a replica of it, and wait for new parameters.

        Gradients are left as they are, so call `zero_grad` yourself. Parameters change only during calls of this
        trainer, including those of other threads that share them.

        Args:
            module: The model, or a replica of it whose gradients to send; by default the model.
            loss: The loss of this step, shown by `thinwire watch`. Nothing is computed with it.

        Returns:
            Whether they were sent: gradients that are not finite are not, and the residual stays as it was.

        Raises:
            ServerError: If a server is gone or has failed.
            FloatingPointError: After 20 steps in a row whose gradients were not finite, or where finite ones and the
                residual add up to more than their dtype holds. Nothing is sent then.
            StateError: If parameters have moved since `connect`, or a gradient belongs to a parameter that no server
                has.
            ValueError: For gradients of rows that were never fetched, with `fetch_rows`. Nothing is sent then.
            TypeError: For a module that is none.
        """
        refuse_unfit("gradients are sent", "leave out step()")
        module = self.model if module is None else module
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is {module!r:.100}; expected a replica, and the loss by name: step(loss=loss)")
        if module in self._interrupted:
            raise KeyboardInterrupt
        begun = self._begun.get(module, self._bases())
        self._catch_up()
        gradients = self._gradients(module)
        if not all_finite(x._values() if x.is_sparse else x for x in gradients.values()):
            self._skip()
            return False
        bases = [
            base._replace(version=channel.copy.oldest(base.version, gradients))
            for channel, base in zip(self._channels, begun, strict=True)
        ]
        self._wait(self._push(gradients, bases, loss=loss, drain=False) - self._in_flight)
        self._begun[module] = self._bases()
        return True

    def _gradients(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the gradients by name. Raises StateError if these parameters are not those that servers have."""
        for channel in self._channels:
            channel.copy.check(module)
        known = {name for channel in self._channels for name in channel.copy.places.parameters}
        found = {name: p for name, p in named(module).items() if p.grad is not None}
        if strange := [name for name, p in found.items() if p.requires_grad and name not in known]:
            raise StateError(
                f"{strange[0]} has a gradient, but no server has that parameter, so it would not be trained "
                f"({len(strange)} such parameters). Unfreeze and add layers before serve and connect, or freeze "
                "them again"
            )
        grads = ((name, p.grad.detach()) for name, p in found.items() if p.grad is not None)
        return {name: g.coalesce() if g.is_sparse else g for name, g in grads}  # sums may leave their dtype's range

    def _skip(self) -> None:
        """Count a step whose gradients are not finite. Raises FloatingPointError after many in a row."""
        for channel in self._channels:
            channel.check()
        with self._lock:
            self._skipped, self._in_a_row = self._skipped + 1, self._in_a_row + 1
            skipped = self._in_a_row
        if skipped == 1:
            logger.warning("gradients are not finite: nothing is sent for this step")
        if skipped >= _BEARABLE:
            raise FloatingPointError(
                f"gradients have not been finite for {skipped} steps, so training has diverged, or this trainer's data "
                "are at fault. If all trainers raise this, restart the server from its checkpoint or from the "
                ".previous one, with a lower learning rate"
            )

    @checked
    def fetch(self, rows: Mapping[str, Tensor] | None = None) -> None:
        """Wait until rows of sparse embeddings hold the servers' current values, in the model and in all its replicas.

        "Current" is after all updates that were sent before. Several threads may fetch and step at once.

        Args:
            rows: By a parameter's name, such as "embedding.weight", the ids (int64 or int32, of any shape, repeats
                allowed) of the rows to fetch; None fetches all rows, to evaluate or to save.

        Raises:
            ValueError: Without `fetch_rows`, for another parameter, and for a row that does not exist.
            TypeError: For ids that are not integers.
            ServerError: If a server is gone.
        """
        ids = wanted([entry for channel in self._channels for entry in channel.layout.fetched], rows)
        self._wait(0, [channel.fetch(ids) for channel in self._channels])

    def drain(self) -> None:
        """Send the residual, uncompressed, and wait until it is applied.

        Raises:
            TypeError: If the recipe's memory cannot send its residual at once.
        """
        if not drainable(self._recipe):
            raise TypeError("this recipe's memory cannot send its residual at once: only error feedback can")
        self._wait(self._push({}, self._bases(), loss=None, drain=True))

    @checked
    def run(self, work: Work, *, threads: Count) -> None:
        """Call `work` in `threads` threads at once, each with a replica of the model (Hogwild, Recht et al. 2011).

        Replicas share the parameters; gradients and buffers are their own. Each calls `step(replica)`. All threads
        share one memory. The first exception is raised again once all threads have ended; after ^C, `step` ends them.
        """
        replicas = [self.replica() for _ in range(threads)]
        self._begun.update((each, self._bases()) for each in replicas)
        with ThreadPoolExecutor(threads) as pool:
            try:
                list(pool.map(work, replicas))
            except KeyboardInterrupt:
                self._interrupted.update(replicas)
                raise

    def replica(self) -> nn.Module:
        """Return a copy of the model that shares its parameters' storage, with gradients and buffers of its own."""
        shared = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in self.model.parameters()}
        return copy.deepcopy(self.model, dict(shared))

    @property
    def memory(self) -> MemoryUse:
        """Residuals, the log of updates that may have to be sent again, and the most that encoding takes."""
        waiting = sum(memory.nbytes for memory in self._recipe.memories())
        staging = sum(channel.staged_bytes for channel in self._channels)
        return MemoryUse(waiting, staging, max(channel.uplink.scratch for channel in self._channels))

    def traffic(self) -> Traffic:
        """Return what has been sent and received so far."""
        sent, received = (sum(each) for each in zip(*(channel.counted for channel in self._channels), strict=True))
        return Traffic(
            updates=self._number,
            saved=min(channel.saved for channel in self._channels),
            skipped=self._skipped,
            dropped=sum(channel.dropped for channel in self._channels),
            drained=self._drained,
            sent_bytes=sent,
            received_bytes=received,
            fetched_rows=sum(channel.copy.count for channel in self._channels),
            waited=self._waited,
        )

    def settle(self, seconds: float) -> bool:
        """Have servers save all that was sent, and wait until they have.

        Args:
            seconds: How long to wait at most.

        Returns:
            Whether they have saved it.
        """
        end = time.monotonic() + min(seconds, threading.TIMEOUT_MAX)
        settled = all(channel.settle(end - time.monotonic()) for channel in self._channels)
        self._catch_up()
        return settled

    def close(self, *, goodbye: bool = True) -> None:
        """Leave, once servers have taken in all updates. The residual is lost; call `drain` first to send it.

        With more than four updates in flight that may be only when the slowest trainer is as far. A server that is gone
        is waited for as `reconnect` says, and only if it has not taken in all; one that falls silent is gone after
        `timeout`. Without `goodbye`, nobody is waited for, and servers treat this trainer as killed.

        Raises:
            ServerError: If a server that is gone may lack updates. Everything else is done.
        """
        with self._ending, ExitStack() as closing:  # all of it, whatever is raised
            for channel in self._channels:  # first: they wait for each other's turns, and who sends has our lock
                channel.stop(goodbye=goodbye)
            closing.enter_context(self._lock)
            closing.callback(self._catch_up)  # so that the model has what has come
            for channel in self._channels:
                closing.callback(channel.close, goodbye=goodbye)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _push(
        self, gradients: dict[str, Tensor], bases: Sequence[Base], *, loss: float | Tensor | None, drain: bool
    ) -> int:
        """Encode and send one update. All threads take turns, so the memory sees one gradient after another."""
        told = math.nan if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
        for channel in self._channels:  # all of them, before the first takes the residual
            channel.check()
            channel.uplink.check(gradients)
        with self._lock:
            number = self._number + 1  # taken when all of it is encoded: servers accept no gap
            drain |= self._drain_every is not None and self._chance.random() * self._drain_every < 1
            memories = self._recipe.memories()
            try:
                encoded = self._encoded(number, gradients, drain=drain)
                with untorn():  # what memories no longer hold is logged for each server
                    for memory in memories:
                        memory.commit()
                    self._number, self._drained, self._in_a_row = number, self._drained + drain, 0
                    for channel, base, body in zip(self._channels, bases, encoded, strict=True):
                        channel.send(number, base, body, loss=told, flags=Flag.DRAINED * drain)
            except BaseException:  # what waits is as it was, or committed
                for memory in memories:
                    memory.rollback()
                raise
            for channel in self._channels:  # when all of it is logged: who is interrupted meanwhile can go on
                channel.wait_for_room()
            return number

    def _encoded(self, number: int, gradients: Mapping[str, Tensor], *, drain: bool) -> list[list[Bytes]]:
        """Encode for all servers, and stage what waits."""
        encoded = [pack(channel.uplink.encode(number, gradients, drain=drain)) for channel in self._channels]
        if not all(channel.uplink.finite for channel in self._channels):
            raise FloatingPointError(
                "gradients and what waits of earlier ones add up beyond the range of their dtype: nothing was "
                "sent, and the residual is as it was; clip the gradients"
            )
        return encoded

    def _bases(self) -> list[Base]:
        return [channel.copy.base for channel in self._channels]

    def _catch_up(self) -> None:
        for channel in self._channels:
            channel.copy.catch_up()

    def _wait(self, update: int, questions: Iterable[int] = repeat(0)) -> None:
        start = time.monotonic()
        for channel, question in zip(self._channels, questions, strict=False):
            channel.wait(update, question)
        self._waited += time.monotonic() - start
        self._catch_up()


def _leave(ending: ExitStack) -> None:
    """End a trainer that nobody holds any more, as if it was killed; in a thread, as who dropped it may hold locks."""
    ending.callback(logger.warning, "a trainer was dropped without close: what was on its way may be lost")
    threading.Thread(target=ending.close, daemon=True).start()


@checked
def connect(
    model: nn.Module,
    recipe: Reducer,
    *,
    address: str | Sequence[str] | None = None,
    ticket: Given = None,
    servers: Count = 1,
    down: Codec | None = None,
    fetch_rows: bool = False,
    in_flight: Size = 0,
    drain: Count | None = None,
    seed: Whole = 0,
    reconnect: Seconds = 0.0,
    log_bytes: Count = 1 << 28,
    timeout: Positive = 30.0,
) -> Trainer:
    """Join the parameter servers, load their parameters, and return the trainer.

    Args:
        model: The same as the servers'. Its parameters become views of flat vectors; use neither DDP nor an optimizer.
        recipe: The same as the servers'.
        address: host:port of each server, in their order; under torchrun trainers find them by themselves.
        ticket: The servers' `Server.ticket`, or a file that holds it: one for all, or one for each. By default
            THINWIRE_TICKET (separated by commas), or what a server on this host has left for this user, or torchrun's.
        servers: The same as the servers'.
        down: The same as the servers'.
        fetch_rows: The same as the servers'. Rows of sparse embeddings are then updated only when `Trainer.fetch` asks
            for them. It uses 8 bytes a row to track its age.
        in_flight: How many updates may be unanswered when `step` returns. 0 waits for the answer to each. Answers that
            come later are taken over within the next `step`.
        drain: At random steps, this many apart on average, send the whole residual uncompressed.
        seed: Seed for choosing those steps.
        reconnect: Seconds to keep trying to reach a server that is gone, or not yet started. Updates that it has not
            saved are kept and sent again; each is applied once.
        log_bytes: How many bytes of unsaved updates to keep, per server.
        timeout: Seconds of silence after which a server counts as gone.

    Returns:
        The trainer: call its `step()` in place of an optimizer's. A context manager, which closes it.

    Raises:
        FingerprintError: If recipe, parameters or frozen parameters differ from the servers'.
        ValueError: If the recipe or the model is already in use in this process, if there are no rows to fetch, for
            parameters that are complex or on several devices, or for something that is not a ticket, or one that
            others may read.
        ServerError: If a server cannot be reached, does not know the ticket, or none is given or found.
        ImportError: Without pyzmq.
        TypeError: If `drain` is given and the memory cannot be drained.

    Example:
        >>> sgd = partial(torch.optim.SGD, lr=0.1)
        >>> server = tw.serve(nn.Linear(64, 64), tw.recipes.topk(), make_optimizer=sgd, address="localhost:0")
        >>> model = nn.Linear(64, 64)
        >>> with server, tw.connect(model, tw.recipes.topk(), address=server.address) as trainer:
        ...     model(torch.ones(1, 64)).sum().backward()
        ...     trainer.step()
        True
    """
    if drain is not None and not drainable(recipe):
        raise TypeError(
            "drain= sends the residual of error feedback; this recipe's memory keeps something else: leave out drain="
        )
    check_installed()
    tickets, memories = said(ticket), [memory for memory in recipe.memories() if memory.stateful]
    residuals = (
        "trainer of this process, and their residuals would mix: make a recipe for each trainer, or use one trainer "
        "with threads (Trainer.run)"
    )
    with ExitStack() as ending:
        ending.enter_context(claimed([("this recipe", memory) for memory in memories], residuals))
        its = layouts(model, recipe, down, servers=servers, fetch_rows=fetch_rows)
        for layout in its:  # before it waits for servers, which may take as long where nothing is cached
            layout.compile()
        places, who = addresses(address, servers, max(timeout, reconnect)), secrets.token_hex(16)
        if len(tickets) not in (1, servers):
            raise ValueError(f"{len(tickets)} tickets for {servers} servers; expected one, or one for each")
        channels, shared = list[Channel](), Shared()
        for i, layout in enumerate(its):
            ending.enter_context(layout.claimed(model))
            settings = Settings(places[i], i, tickets[i % len(tickets)], who, timeout, reconnect, log_bytes, shared)
            channels.append(Channel(settings, layout, model))
            ending.callback(channels[-1].close, goodbye=False)
        for channel in channels:  # once all servers have taken it in: who is refused keeps its parameters
            channel.copy.catch_up()
        for memory in memories:
            ending.callback(memory.restore, {})  # the residual is lost, and no later trainer sends it
        return Trainer(model, recipe, channels, ending.pop_all(), drain=drain, seed=seed, in_flight=in_flight)
