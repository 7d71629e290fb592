"""One server, as a trainer sees it: its parameters, a connection that may be made anew, updates that may be lost."""

import itertools
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from thinwire import trace
from thinwire.errors import FingerprintError, PayloadError, ServerError
from thinwire.payloads import Blocks, Payload
from thinwire.reducer import Bucket, Reducer
from thinwire.reducer.wrappers import release
from thinwire.waits import all_finite
from thinwire.wire.frames import LIFE, WINDOW, Bytes, Flag, Frame, FrameError, GoneError, Kind, Talk
from thinwire.wire.layout import Entry, Layout, Part, Places, asking, pack, table, write_rows
from thinwire.wire.rendezvous import ticket
from thinwire.wire.sockets import TICK, Bell, Link

logger = logging.getLogger("thinwire")
_NEVER = -1


class Base(NamedTuple):
    """What gradients are computed on: the server's version, as it was known when the trainer had joined so often."""

    version: int
    joins: int


@final
class Copy:
    """A trainer's copy of one server's parameters, overwritten only by `catch_up`: not from forward to backward.

    Of the rows that it fetches it knows the version of each (8 bytes a row), and counts them.
    """

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        self._layout, self.places, self.count = layout, Places(layout, model), 0
        self._versions = [torch.full(each.shape[:1], _NEVER, dtype=torch.int64) for each in layout.fetched]
        self._lock, self.base = threading.Lock(), Base(0, 0)
        self._payloads, self._rows = list[tuple[Part, Payload]](), list[tuple[Entry, Blocks]]()
        """What has come and is not written yet, and what that is computed on."""
        self._next = self.base
        self._changes: list[int] | None = self._counted()

    def check(self, module: nn.Module) -> None:
        """Raise StateError if parameters of this model or replica have moved. Warn once if others write them."""
        self.places.check(module)
        if self._changes is not None and self._changes != self._counted():
            self._changes = None
            logger.warning(
                "something other than thinwire, such as an optimizer or load_state_dict, has changed parameters that a "
                "server keeps. The server's next answer overwrites the change or, with down=, leaves a difference. "
                "Swapping an average in for evaluation and out again is harmless"
            )

    def _counted(self) -> list[int]:
        """Return how often somebody else has changed each parameter in place: answers do not count."""
        return [p._version for p in self.places.parameters.values()]

    def take(self, body: memoryview, base: Base, number: int | None = None) -> None:
        """Keep an answer to update `number`, or everything, until `catch_up`. Raises FrameError or PayloadError."""
        parts = self._layout.dense if number is None else self._layout.down
        payloads, rows = self._layout.read(body, parts, self._layout.pushed, number or 1)
        with self._lock:
            if parts is self._layout.dense:  # which is more than all before
                self._payloads.clear()
            if number is None:
                self._rows.clear()
            self._payloads += zip(parts, payloads, strict=True)
            self._rows += zip(self._layout.pushed, rows, strict=True)
            self._next = base

    @torch.no_grad()
    def catch_up(self) -> None:
        """Write what has come."""
        with self._lock:
            for part, payload in self._payloads:
                part.write(payload, self.places.flats[part.dtype], whole=part in self._layout.dense)
            for entry, rows in self._rows:
                write_rows(self.places.parameters[entry.name], entry, rows)
            self._payloads.clear()
            self._rows.clear()
            self.base = self._next

    @torch.no_grad()
    def fetched(self, keys: Sequence[Tensor], body: memoryview, version: int) -> None:
        """Write the rows with these ids. Raises FrameError or PayloadError, and then nothing has been written."""
        _, found = self._layout.read(body, (), self._layout.fetched)
        for entry, asked, rows in zip(self._layout.fetched, keys, found, strict=True):
            if not torch.equal(rows.keys.long(), asked.long()):
                raise PayloadError(f"{rows.keys.numel()} rows of {entry.name}; expected the {asked.numel()} asked for")
        for i, (entry, rows) in enumerate(zip(self._layout.fetched, found, strict=True)):
            write_rows(self.places.parameters[entry.name], entry, rows)
            self._versions[i][keys[i]] = version
            self.count += keys[i].numel()

    def rejoined(self, version: int) -> None:
        """Note that a server has gone back to this version: nothing that is here is newer."""
        for each in self._versions:
            each.clamp_(max=version)

    def oldest(self, version: int, gradients: Mapping[str, Tensor]) -> int:
        """Return the version of the oldest values under these gradients; ValueError for rows never fetched."""
        found = [version] if self._layout.sizes else []
        for entry, versions in zip(self._layout.fetched, self._versions, strict=True):
            if (gradient := gradients.get(entry.name)) is not None and (keys := gradient._indices()[0].cpu()).numel():
                found.append(int(versions[keys].min()))
                if found[-1] == _NEVER:
                    never = keys[versions[keys] == _NEVER].unique()
                    raise ValueError(
                        f"{entry.name} has gradients for {never.numel()} rows that were never fetched, such as row "
                        f"{int(never[0])}: call trainer.fetch({{{entry.name!r}: ids}}) with the batch's ids before the "
                        "forward pass"
                    )
        return min(found, default=version)


def wanted(parameters: Sequence[Entry], given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the ids given, as ascending int64 on the CPU, or all; TypeError or ValueError for those that cannot be."""
    known = {each.name: each for each in parameters}
    if not known:
        raise ValueError("fetch needs fetch_rows=True, in both serve and connect")
    if given is None:
        return {name: torch.arange(each.shape[0]) for name, each in known.items()}
    if strange := given.keys() - known.keys():
        raise ValueError(f"{min(strange)!r} has no rows to fetch; expected some of {', '.join(map(repr, known))}")
    return {name: _ids(known[name], ids) for name, ids in given.items()}


def _ids(entry: Entry, ids: Tensor) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids of {entry.name} are {ids.dtype}; expected int64 or int32: call .long() on them")
    found = ids.detach().reshape(-1).cpu().long().unique()
    if found.numel() and not 0 <= int(found[0]) <= int(found[-1]) < entry.shape[0]:
        raise ValueError(
            f"ids of {entry.name} range from {int(found[0])} to {int(found[-1])}; expected 0 to {entry.shape[0] - 1}: "
            "pass the ids that its embedding looks up, offsets included"
        )
    return found


@final
@dataclass
class Shared:
    """What a trainer's channels share: who waits for one server hears of the `error` of another, which `told` was.

    By how much it is `ahead` of its updates' numbers, on all servers that it has `joined`, each in its turn. The first
    decides, unless another is far ahead of it. The others are told, if need be once more.
    """

    ahead: int | None = None
    joined: set[int] = field(default_factory=set)
    turn: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)
    error: Exception | None = None
    told: Exception | None = None


@final
@dataclass(frozen=True)
class Settings:
    """How a trainer (32 hexadecimal digits) talks to a server, the `index`-th: seconds of patience, bytes of log."""

    address: str
    index: int
    ticket: str | os.PathLike[str] = field(repr=False)
    trainer: str
    timeout: float
    patience: float
    room: int
    shared: Shared


@final
class Uplink:
    """A recipe's memory and codec between gradients and updates' bodies; not thread-safe; `who` seeds its own draws."""

    def __init__(self, layout: Layout, who: str, device: torch.device | None = None) -> None:
        self._layout, self._who, self.scratch, self.finite = layout, who, 0, True
        self._flats, self._views = layout.flats(device)
        self.staged = sum(flat.nbytes for flat in self._flats.values())

    def encode(self, number: int, gradients: Mapping[str, Tensor], *, drain: bool) -> list[Tensor]:
        """Return the sections of update `number`; what they do not deliver is staged, for the caller to commit.

        If they `drain`, all of the residual goes out. Gradients are read, not kept; zeros for those missing.
        `finite` says whether all sections are: if not, a server would drop them.
        """
        with trace.span("encode"):
            for name, view in self._views.items():
                view.zero_() if (gradient := gradients.get(name)) is None else view.copy_(gradient)
            parts, sections, self.finite = self._layout.up(number), list[Tensor](), True
            if drain:
                parts, memories = self._layout.dense, self._layout.recipe.memories()
                for dtype, segment in self._layout.segments:
                    release(memories, Bucket(flat=self._flats[dtype], segments=[segment]), 1.0)
            for part in parts:
                bucket = part.bucket(self._flats[part.dtype])
                payload = part.encode(bucket, number, self._who)
                self.finite &= all_finite(x for x in payload.tensors() if x.is_floating_point())
                self.scratch = max(self.scratch, part.way.most(bucket, payload, number - 1))
                sections.append(payload.packed.cpu())
            return [*sections, *(_rows(entry, gradients.get(entry.name)) for entry in self._layout.rows)]

    def check(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise TypeError for gradients that are sparse where the layout's are not, or the other way round."""
        for entry in self._layout.parameters:
            gradient = gradients.get(entry.name)
            if gradient is not None and gradient.is_sparse != entry.rows:
                raise TypeError(
                    f"{entry.name} got a {'sparse' if gradient.is_sparse else 'dense'} gradient; expected a "
                    f"{'sparse' if entry.rows else 'dense'} one: rows are sent for nn.Embedding(sparse=True) whose "
                    "weight is used nowhere else"
                )


class Request(NamedTuple):
    """What a server is sent, in this order: an update, a question for rows, or a word."""

    order: int
    kind: Kind
    number: int = 0
    body: Sequence[Bytes] = ()
    base: Base = Base(0, 0)
    loss: float = math.nan
    flags: int = 0


_SAVE, _BYE = Request(0, Kind.PING, flags=Flag.SAVE), Request(0, Kind.BYE)


@final
class Channel:
    """Sends updates to one server, in order, and takes its answers into the trainer's `copy`.

    An update stays in the log until the server says that it is on disk. After a lost connection the channel joins again
    and goes on with the first that the server has not applied. Its own thread alone uses the connection.
    """

    def __init__(self, settings: Settings, layout: Layout, model: nn.Module) -> None:
        self._settings, self.copy = settings, Copy(layout, model)
        self.layout, self.uplink = layout, Uplink(layout, settings.trainer, self.copy.places.device)
        self._shared, self._changed = settings.shared, settings.shared.changed
        self._bell, self._orders = Bell(), itertools.count(1)
        self._log, self._logged = dict[int, Request](), 0  # updates that are not on disk, by number, and their bytes
        self._open = dict[int, tuple[Request, Sequence[Tensor]]]()  # questions, by number, and for which rows
        self._floors, self._life, self._ahead = list[int](), 0, 0
        self.counted = [0, 0]
        """Bytes sent and received, headers included."""
        self._queue, self._waiting = deque[Request](), 0  # what has yet to be sent, and how many have no answer
        self._full = self._joined = False
        self._answered = self.saved = self.dropped = 0
        """`saved`: the latest update that the server has on disk; of one without a checkpoint, that it applied."""
        self._goodbye: bool | None = None  # what `close` was told
        self._left = False  # whether the server has answered BYE
        self._sound, self._deadline = True, 0.0  # whether a loss now is one of its own, and until when it is borne
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            self.wait()
        except BaseException:
            self.close(goodbye=False)
            raise
        self.copy.catch_up()

    @property
    def staged_bytes(self) -> int:
        """Bytes of the updates that may have to be sent once more, and of the vectors that are encoded."""
        return self._logged + self.uplink.staged

    def send(self, number: int, base: Base, body: Sequence[Bytes], *, loss: float, flags: int) -> None:
        """Log an update, to be sent. Does not wait, as whoever waits may be interrupted. One thread at a time."""
        with self._changed:
            update = Request(next(self._orders), Kind.UPDATE, number, body, base, loss, flags)
            self._log[number] = update
            self._logged += sum(map(len, body))
            self._full |= self._logged > self._settings.room // 2
            self._queue.append(update)
        self._bell.ring()

    def wait_for_room(self) -> None:
        """Wait while the log is too full, unless by one update alone. Raises ServerError."""
        with self._changed:
            self._until(lambda: len(self._log) < 2 or self._logged <= self._settings.room)
            self.check()

    def wait(self, update: int = 0, question: int = 0) -> None:
        """Wait until this has joined, and both are answered. Raises ServerError if one of them never will be."""

        def so() -> bool:
            return bool(self._floors) and self._answered >= update and question not in self._open

        with self._changed:
            self._changed.wait_for(lambda: self._shared.error or so())
            if not so():
                self.check()

    def fetch(self, ids: Mapping[str, Tensor]) -> int:
        """Ask for the rows that this server has, and return the question's number, 0 for none. Raises ServerError."""
        none = torch.empty(0, dtype=torch.int64)
        keys = [ids.get(each.name, none) for each in self.layout.fetched]
        if not any(each.numel() for each in keys):
            return 0
        body = pack([asking(*each) for each in zip(self.layout.fetched, keys, strict=True)])
        with self._changed:
            self.check()
            number = next(self._orders)
            self._open[number] = Request(number, Kind.FETCH, number, body), keys
            self._queue.append(self._open[number][0])
        self._bell.ring()
        return number

    def settle(self, seconds: float) -> bool:
        """Have the server save once it has all that was sent, and wait for that, at most so long. Return whether."""
        with self._changed:
            last = next(reversed(self._log), 0)  # other threads may go on
            self._until(lambda: self.saved >= last, seconds)
            return self.saved >= last

    def _until(self, enough: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until enough is saved, or this has ended. Have the server save when it has all that is logged now.

        Over each connection: what an earlier one was told may be lost, and a server that started again has gone back.
        """
        last, asked = next(reversed(self._log), 0), 0

        def so() -> bool:
            nonlocal asked
            done = bool(self._shared.error) or enough()
            if not done and self._answered >= last and asked != len(self._floors):
                asked, self._full = len(self._floors), True
                self._bell.ring()
            return done

        self._changed.wait_for(so, seconds)

    def stop(self, *, goodbye: bool) -> None:
        """Wake all waiting threads, accept no more updates, and leave: with a `goodbye`, when the server has all."""
        with self._changed:
            self._shared.error = self._shared.error or ServerError("this trainer was closed: connect again")
            self._changed.notify_all()
            if self._goodbye is None:
                self._goodbye = goodbye
                self._queue.append(_BYE)
        self._bell.ring()

    def close(self, *, goodbye: bool) -> None:
        """Stop, and wait until the connection is closed. Later calls do nothing.

        Raises ServerError if the server may not have all that was logged, unless the reason has been told.
        """
        self.stop(goodbye=goodbye)
        self._thread.join()
        if self._goodbye and self._unconfirmed and self._shared.told is not self._shared.error:
            self._shared.told = self._shared.error
            raise ServerError(
                f"the server at {self._settings.address} has not confirmed the last {self._unconfirmed} updates, which "
                "may be lost: call settle before close, and pass reconnect= to wait for a server that is gone"
            ) from self._shared.error

    def check(self) -> None:
        """Raise the error that ended the channel, if any; in a forked child, whose threads are gone, there is one."""
        if not (self._shared.error or self._thread.is_alive()):
            raise ServerError("this trainer belongs to another process, which forked this one: connect anew")
        if self._shared.error is not None:
            self._shared.told = self._shared.error
            raise self._shared.error

    @property
    def _unconfirmed(self) -> int:
        """How many updates the server may not have taken in."""
        return 0 if self._left else max(0, next(reversed(self._log), 0) - self._answered)

    @property
    def _over(self) -> bool:
        """Whether this was closed, and after a BYE the server has all updates, or is gone and lacks none."""
        with self._changed:
            waits = self._goodbye and not self._left and (self._joined or self._unconfirmed)
            return self._goodbye is not None and not waits

    def _run(self) -> None:
        """Join, send what is due and take in answers; after a loss, again. `send` and `wait` raise what ends it."""
        try:
            while not self._over:
                try:
                    with ExitStack() as ending:
                        with self._shared.turn:
                            link = ending.enter_context(closing(self._called()))
                            self._join(link)
                        self._converse(link)
                except GoneError as error:
                    self._lost(error)
                finally:
                    self._shared.joined.discard(self._settings.index)
        except Exception as error:
            self._fail(error)

    def _called(self) -> Link:
        """Return a new connection. Raises ServerError, GoneError, or ValueError for what is no ticket."""
        its = self._settings
        key = ticket(its.ticket, its.address, its.index, seconds=its.timeout)
        talk = Talk(self.layout.told, self.counted)
        return Link(its.address, key, self._bell, talk, timeout=its.timeout, over=lambda: self._over)

    def _join(self, link: Link) -> None:
        with self._changed:
            sent = max(self.saved, next(reversed(self._log), 0))
        pace = (self._shared.ahead, sent, WINDOW * bool(self._shared.joined))
        asked = {"trainer": self._settings.trainer, "agreed": dict(self.layout.agreed), "pace": pace}
        link.send(Kind.JOIN, json.dumps(asked).encode())
        self._joined = False
        while not self._over and not self._joined:
            if (frame := link.receive()) is not None:
                self._take(frame)

    def _converse(self, link: Link) -> None:
        """Do what is to be done, until another server decides the pace anew. Raises GoneError."""
        while not self._over and self._ahead == self._shared.ahead:
            if (due := self._due()) is not None:
                version = min((due.base.version, *self._floors[due.base.joins :]))
                told = {"number": due.number, "version": version, "loss": due.loss, "flags": due.flags}
                link.send(due.kind, *due.body, **told)
            elif (frame := link.receive()) is not None:
                self._take(frame)

    def _due(self) -> Request | None:
        """Return what may be sent now, if anything may, and take it for sent."""
        with self._changed:
            if self._full:
                self._full = False
                return _SAVE
            self._sound |= not self._queue and not self._waiting
            waits = bool(self._queue) and self._queue[0].kind is not Kind.BYE
            if not self._queue or (waits and self._waiting == WINDOW):
                return None
            self._waiting += waits
            return self._queue.popleft()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            said = ""
            if isinstance(error, (FrameError, PayloadError)):
                said = f"the server's answer cannot be read ({error}): do both run the same version of thinwire?"
            elif self._floors and not isinstance(error, (ServerError, FingerprintError)):
                said = f"the thread that listens to the server has failed: {type(error).__name__}: {error}"
            self._shared.error = ServerError(said) if said else error
            self._changed.notify_all()

    def _lost(self, error: GoneError) -> None:
        """Have the trainer join again, within the patience that each loss has of its own. Raises ServerError."""
        self._joined, where, patience = False, self._settings.address, self._settings.patience
        if self._sound and patience:
            logger.warning("no connection to the server at %s (%s); trying again for %g s", where, error, patience)
            self._sound, self._deadline = False, time.monotonic() + patience
        elif time.monotonic() < self._deadline:
            time.sleep(TICK)
        else:
            what = f"cannot join a server at {where}"
            fix = "start it first, with this version of thinwire, or pass reconnect=, in seconds, to wait for it"
            if self._floors:
                what = f"the server at {where} is gone, or closes the connection whenever this trainer joins"
                fix = "see its log, start it again from its checkpoint, and pass reconnect=, in seconds, to wait for it"
            raise ServerError(f"{what}: {error}" if error.fix else f"{what} ({error}): {fix}") from error

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.PING:
                pass
            case Kind.JOIN if not self._joined:
                self._welcomed(frame)
            case Kind.UPDATE if self._joined:
                if not frame.flags & Flag.BRIEF:
                    self.copy.take(frame.body, Base(frame.version, len(self._floors)), frame.number)
                self._answered, self.dropped = frame.number, self.dropped + bool(frame.flags & Flag.DROPPED)
            case Kind.FETCH:
                if (asked := self._open.get(frame.number)) is None:
                    raise FrameError(f"rows for request {frame.number}, which is not open")
                self.copy.fetched(asked[1], frame.body, frame.version)
                del self._open[frame.number]
            case Kind.END if frame.flags & Flag.FINAL:
                raise (ServerError if self._joined else FingerprintError)(f"{self._settings.address}: {frame.words}")
            case Kind.END:
                raise GoneError(frame.words)
            case Kind.BYE if self._goodbye:
                self._left = True
            case _:
                raise FrameError(f"the server sent {frame.kind.name} out of turn")
        with self._changed:
            if frame.kind in (Kind.UPDATE, Kind.FETCH):
                self._sound, self._waiting = True, self._waiting - 1
            while (first := next(iter(self._log), frame.saved + 1)) <= frame.saved:  # it is on disk
                self._logged -= sum(map(len, self._log.pop(first).body))
            self.saved = max(self.saved, frame.saved)
            self._changed.notify_all()

    def _welcomed(self, frame: Frame) -> None:
        """Take in all parameters, and have sent again what the server has not applied."""
        if frame.number < self.saved:
            raise ServerError(
                f"the server at {self._settings.address} has applied {frame.number} updates of this trainer, fewer "
                f"than the {self.saved} it had saved: start it from its checkpoint, or restart this trainer"
            )
        life, restored, self._ahead = LIFE.unpack_from(frame.body)
        self._shared.ahead = self._ahead
        self._shared.joined.add(self._settings.index)
        self.copy.take(frame.body[LIFE.size :], Base(frame.version, len(self._floors) + 1))
        floor = frame.version if life == self._life else restored  # to which the server went back
        self.copy.rejoined(floor)
        with self._changed:
            again = [each for number, each in self._log.items() if number > frame.number]
            again[:-1] = [each._replace(flags=each.flags | Flag.BRIEF) for each in again[:-1]]
            self._queue = deque(sorted([*again, *(question for question, _ in self._open.values())]))
            self._queue.extend([_BYE] * (self._goodbye is not None))
            self._life, self._answered, self._waiting, self._joined = life, frame.number, 0, True
            self._floors.append(floor)


def drainable(recipe: Reducer) -> bool:
    """Whether all that waits in this recipe's memories can go out at once."""
    return all(any(part.releases for part in memory.parts) for memory in recipe.memories() if memory.stateful)


def _rows(entry: Entry, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return table(entry, torch.empty(0), torch.empty(0, dtype=entry.dtype))
    gradient = gradient.coalesce()
    return table(entry, gradient.indices()[0], gradient.values())
