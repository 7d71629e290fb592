"""Send a parameter server what it must not accept: `python fuzz/server.py 1000000 [SEED]`.

Frames of every kind, damaged at random, go to sessions as messages, or straight to the readers of frames, updates,
questions for rows and their answers. Each must be refused or be what it was before the damage; the parameters, the
versions and the counts of what was applied never change but by a whole update. Prints how many messages met what.
"""

import json
import logging
import random
import sys
from collections import Counter, deque
from collections.abc import Iterator

import torch
from torch import nn

import thinwire
from thinwire.errors import PayloadError
from thinwire.server.answers import rows_for
from thinwire.server.central import read_update
from thinwire.server.hub import RefusedError, Session
from thinwire.server.server import Server
from thinwire.trainer.contents import Copy, Uplink
from thinwire.wire.frames import (
    HEADER,
    MAGIC,
    PROTOCOL,
    Flag,
    Frame,
    FrameError,
    GoneError,
    Kind,
    numbered,
    parse,
)
from thinwire.wire.layout import layouts
from thinwire.wire.sections import asking, pack, read_ids, unpack

WHO, REPORT = "0" * 32, 50_000


class Model(nn.Module):
    """A few parameters of every sort: large, small, half precision, and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, 4, sparse=True)
        self.large = nn.Parameter(torch.ones(300))
        self.small = nn.Parameter(torch.ones(3))
        self.narrow = nn.Parameter(torch.ones(100, dtype=torch.float16))


class Fuzzed:
    """A server, a body that it would accept, and what it must still be after all that follows."""

    def __init__(self, recipe: thinwire.reducer.Reducer, chance: random.Random) -> None:
        self.chance = chance
        self.server: Server = thinwire.serve(
            Model(), recipe, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1), fetch_rows=True, timeout=5.0
        )
        self.central = self.server._hub.central
        self.layout = self.central.layout
        (mine,) = layouts(Model(), recipe, None, servers=1, fetch_rows=True)
        gradients = {name: torch.randn_like(p) for name, p in Model().named_parameters() if name != "rows.weight"}
        keys = torch.tensor([[1, 5, 30]])
        gradients["rows.weight"] = torch.sparse_coo_tensor(keys, torch.ones(3, 4), (40, 4))
        sections = pack(Uplink(mine, WHO).encode(1, gradients, drain=False))
        self.body = b"".join(bytes(x) for x in sections)
        self.keys = [keys[0]]
        (self.entry,), self.rows = self.layout.fetched, Copy(mine, Model())
        several = (*self.keys, torch.arange(0, 40, 2))
        self.asked = [b"".join(bytes(x) for x in pack([asking(self.entry, each)])) for each in several]
        rows = rows_for(self.central, memoryview(bytearray(self.asked[0])))
        self.told = b"".join(bytes(x) for x in rows)
        self.limits = self.layout.asked
        self.before = self.state()

    def state(self) -> tuple[int, int, int, tuple[bytes, ...]]:
        """What must not change: the version, how many updates were not finite, how many there were, and parameters."""
        flat = [bytes(x.detach().view(torch.uint8).numpy()) for x in self.central.parameters.values()]
        return self.central.version, self.central.dropped, sum(self.central.applied.values()), tuple(flat)

    def damaged(self, data: bytes, *, resized: bool = True) -> bytes:
        """Flip and overwrite a few bytes; if `resized`, cut and add some too."""
        found = bytearray(data)
        for _ in range(self.chance.choice((1, 1, 2, 5, 20))):
            at = self.chance.randrange(len(found) + 1)
            match self.chance.choice((0, 1, 2, 3, 4) if resized else (0, 1)):
                case 0 if at < len(found):
                    found[at] ^= 1 << self.chance.randrange(8)
                case 1 if at + 8 <= len(found):
                    found[at : at + 8] = self.chance.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
                case 2:
                    del found[at : at + self.chance.choice((1, 8, 64))]
                case 3:
                    found[at:at] = self.chance.randbytes(self.chance.choice((1, 8, 64)))
                case _:
                    found[at : at + 4] = self.chance.randbytes(4)
        return bytes(found)

    def frame(self) -> bytes:
        """A frame of any kind, with a body that may be an update's or a question's."""
        body = self.chance.choice((b"", self.body, *self.asked, self.chance.randbytes(self.chance.randrange(200))))
        kind, number = self.chance.randrange(8), self.chance.choice((0, 1, 2, 2**64 - 1))
        return HEADER.pack(MAGIC, PROTOCOL, kind, self.chance.randrange(17), number, 0, 0, 1.5, len(body)) + body

    def read(self) -> str:
        """Give the readers a damaged header, or a damaged body."""
        try:
            if self.chance.random() < 0.3:
                frame = parse(self.damaged(self.frame())[: HEADER.size], self.limits)
                assert len(frame.body) <= max(self.limits.values())
                return "header read"
            if self.chance.random() < 0.3:
                return self.look_up()
            flags = self.chance.choice((Flag(0), Flag.DRAINED))
            body = bytearray(self.damaged(self.body, resized=self.chance.random() < 0.3))
            update = read_update(self.layout, WHO, Frame(Kind.UPDATE, flags, 1, 0, 0, 1.5, memoryview(body)))
            self.inspect(update)
        except (FrameError, PayloadError) as error:
            return type(error).__name__
        return "update read"

    def look_up(self) -> str:
        """Give the readers of FETCH and ROWS a damaged body."""
        body = bytearray(self.damaged(self.chance.choice((*self.asked, self.told)), resized=self.chance.random() < 0.3))
        if self.chance.random() < 0.5:
            self.rows.fetched(self.keys, memoryview(body), 1)
            return "rows read"
        check_keys(read_ids(self.entry, unpack(memoryview(body), 1)[0]))
        return "question read"

    def inspect(self, update: object) -> None:
        """Apply what was read to a scratch copy, so that an index out of bounds would show."""
        for part, payload in zip(update.parts, update.payloads, strict=True):  # type: ignore[attr-defined]
            payload.write(torch.empty(part.numel, dtype=part.dtype))
        for rows in update.rows:  # type: ignore[attr-defined]
            check_keys(rows.keys)

    def converse(self) -> Iterator[str]:
        """Have sessions take a hundred damaged messages; one that refuses a message is at its end."""
        session, number = None, 0
        for _ in range(100):
            with self.server._hub.lock:
                try:
                    session, number = session or self._joined(), number + 1
                    session.take(numbered(self.damaged(self.frame()), number))
                    self.server._hub.release()
                    said = "left" if session.over else "frame taken"
                except (FrameError, GoneError, PayloadError, RefusedError) as error:
                    said = f"session: {type(error).__name__}"
                if session is not None and said != "frame taken":
                    session.leave(goodbye=False)
                    session, number = None, 0
            yield said
        if session is not None:
            with self.server._hub.lock:
                session.leave(goodbye=False)

    def _joined(self) -> Session:
        """Return a session that has joined; now and then the words with which it does are damaged, too."""
        said = json.dumps({"trainer": WHO, "agreed": self.layout.agreed, "pace": [None, 0, 0]}).encode()
        session = Session(self.server._hub, WHO.encode(), "here")
        session.talk.outbox = deque(maxlen=0)
        said = said if self.chance.random() < 0.8 else self.damaged(said)
        head = HEADER.pack(MAGIC, PROTOCOL, Kind.JOIN, 0, 0, 0, 0, 0.0, len(said))
        session.take(numbered(head + said, 0))
        return session


def check_keys(keys: torch.Tensor) -> None:
    """Hold the numbers of rows to what is there."""
    assert not keys.numel() or 0 <= int(keys.min()) <= int(keys.max()) < 40
    assert bool((keys.diff() > 0).all())


def main(messages: int, seed: int) -> Counter[str]:
    """Send so many messages, and return what they met."""
    chance, met, told = random.Random(seed), Counter[str](), 0
    recipes = [thinwire.recipes.dct_dp(density=0.05, minimum_size=50), thinwire.recipes.dragonn(momentum=0.9)]
    fuzzed = [Fuzzed(recipe, chance) for recipe in recipes]
    while met.total() < messages:
        each = chance.choice(fuzzed)
        for _ in range(500):
            met[each.read()] += 1
        met.update(each.converse())
        now = each.state()
        if now != each.before:  # the damage may have left a whole update, perhaps one that is not finite
            version, dropped, applied = (new - old for new, old in zip(now[:3], each.before[:3], strict=True))
            assert version + dropped == applied >= 1, "an update was applied in part"
            assert version or now[3] == each.before[3], "an update that was not finite was applied"
            assert all(torch.isfinite(p).all() for p in each.central.parameters.values())
            each.before = now
        if met.total() // REPORT > told:
            told = met.total() // REPORT
            print(f"{met.total():,} messages", file=sys.stderr, flush=True)
    for each in fuzzed:
        each.server.close()
    return met


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    logging.disable()
    for name, count in main(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0).most_common():
        print(f"{count:>9,}  {name}")
