"""Workers that find each other by a store: one global state, whoever is late, gone or new."""

import copy
import gc
import logging
import math
import re
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from certificates import made_certificate
from ranks import Ranks, logged, told
from torch import Tensor, nn

import thinwire as tw
from thinwire.collectives import links, unpacked
from thinwire.collectives.links import Link, Words
from thinwire.integrations.workers import agreement, awake, outer, outer_state, seat, swarm
from thinwire.integrations.workers.agreement import Agreement
from thinwire.integrations.workers.directory import Directory, StoreError, found_address
from thinwire.integrations.workers.fragments import Fragment
from thinwire.integrations.workers.member import Member
from thinwire.integrations.workers.messages import Decision, Note, Share, Standing
from thinwire.integrations.workers.seat import Seat
from thinwire.integrations.workers.swarm import Swarm

H = 3
MADE: Any = dist  # which does not export TCPStore, as mypy has it
dcp: Any = torch.distributed.checkpoint
Log = dict[int, int]
KEPT: list[Any] = []
"""The store of `_swarms`, as long as it is there."""


def _lasting_store() -> Any:
    """A store that may come back: at a port that Linux gives to no connection meanwhile."""
    while True:
        with suppress(dist.DistNetworkError):
            port = 10_000 + secrets.randbelow(20_000)
            return MADE.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


@contextmanager
def _store() -> Iterator[str]:
    """The address of a store on rank 0."""
    found = MADE.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = torch.tensor([found.port if found else 0])
    dist.broadcast(port, 0)
    with patch.object(links, "SILENCE", 60.0):  # a machine with other work may be silent for long
        yield f"tcp://127.0.0.1:{int(port)}"
    dist.barrier()


class Worker:
    """A worker with data of its own. `log`: a hash of what is common to all after each outer step."""

    def __init__(self, store: str, steps: tw.OuterSteps, **options: Any) -> None:
        torch.manual_seed(dist.get_rank())
        self.frozen = nn.BatchNorm1d(40).double().requires_grad_(False)
        nn.init.normal_(self.frozen.weight)  # another on each worker, until they have met
        self.model = nn.Sequential(nn.Linear(24, 40), self.frozen, nn.Tanh(), nn.Linear(40, 16)).double()
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
        self.handle = tw.outer(self.model, self.optimizer, steps, store=store, **options)
        self.log: Log = {}

    def train(self, steps: int = 1) -> "Worker":
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 24, dtype=torch.float64)).square().mean().backward()
            self.optimizer.step()
            if self.handle.ticks % H == 0:
                self.log[self.handle.ticks] = self.hash()
        return self

    def saved(self) -> list[Any]:
        """What it saves to resume from."""
        return [copy.deepcopy(each.state_dict()) for each in (self.model, self.optimizer, self.handle)]

    def resume(self, saved: list[Any]) -> None:
        """Go on from that."""
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.handle.load_state_dict(saved[2])

    def dcp(self, work: Callable[..., Any], path: str, *checkpoint: Any, alone: bool = False) -> None:
        """Save or load by torch.distributed.checkpoint. SGD without momentum has no state."""
        mine = {"model": self.model.state_dict()}
        both = {f"worker {dist.get_rank()}": mine, "thinwire": tw.Checkpoint(self.handle, *checkpoint)}
        work(both, checkpoint_id=path, process_group=self.handle.group if alone else None)

    def hash(self) -> int:
        return hash(tuple(x for p in self.common() for x in p.view(-1).tolist()))

    def common(self) -> list[Tensor]:
        """Global and frozen parameters, and the running statistics on which workers have agreed."""
        return [*self.shared(), self.frozen.weight.detach(), *self.handle._running.agreed]

    def shared(self) -> list[Tensor]:
        return [p.detach() for p in self.handle.parameters.values()]

    def ahead(self) -> list[Tensor]:
        """How far this worker is from the global parameters."""
        own = [p.detach() for p in self.model.parameters() if p.requires_grad]
        return [q - p for p, q in zip(own, self.shared(), strict=True)]

    def train_while_another_does(self, known: set[str]) -> "Worker":
        """Train until somebody else than these has come, and has left again."""
        while not (new := set(self.handle.workers) - known):
            self.train()
        while new & set(self.handle.workers):
            self.train()
        return self


def _member(worker: Worker) -> Member:
    assert isinstance(worker.handle, Member)
    return worker.handle


def _sparse() -> tw.OuterSteps:
    return tw.outer_steps.sparseloco(every=H, minimum_size=64)


def _agree(logs: list[Log]) -> set[int]:
    """Return the ticks that all have, after seeing that no two differ at any."""
    for tick in set().union(*logs):
        assert len({log[tick] for log in logs if tick in log}) == 1, tick
    return set.intersection(*map(set, logs))


METHODS: dict[str, Callable[[], tw.OuterSteps]] = {
    "sparseloco": _sparse,
    "streaming": lambda: tw.outer_steps.streaming_diloco(every=2 * H, fragments=2, delay=1),
    "dense": lambda: tw.OuterSteps(every=H),
}


def _together(method: str, certificate: Path | None) -> Log:
    with _store() as store, patch.multiple(agreement, FOUNDING=1000.0, LOST=1000.0):  # however slow they are
        worker = Worker(store, METHODS[method](), workers=3, grace=1000.0, certificate=certificate).train(4 * H)
        dist.barrier()
        assert worker.handle.verify_replicas()
        dist.barrier()
        with torch.no_grad():
            worker.shared()[0].mul_(2.0 if dist.get_rank() else 1.0)
        names = ["0.weight"] if dist.get_rank() else []
        assert worker.handle.differing_parameters() == names  # the others' are of the outer step
        dist.barrier()
        worker.handle.remove()
        return worker.log


@pytest.mark.parametrize("method", METHODS)
def test_workers_find_each_other_and_have_one_state(ranks: Ranks, method: str, tmp_path: Path) -> None:
    logs = ranks.run(3, _together, method, made_certificate(tmp_path / "run.pem") if method == "dense" else None)
    assert len(_agree(logs)) == 4
    assert len(set(logs[0].values())) == 4


def _one_is_late(method: str) -> tuple[Log, float, bool]:
    """Rank 2 takes its inner steps when the others have taken two outer ones without it."""
    late = dist.get_rank() == 2
    with _store() as store:
        worker, far, sent = Worker(store, METHODS[method](), workers=3, grace=0.2, quorum=0.5), 0.0, True
        while not late and _member(worker)._swarm.at < 2 * H:
            worker.train()  # one of the two may be late as well, and has then fewer steps to take
        dist.barrier()
        if late:
            worker.train(H - 1)
            before, handle = worker.ahead(), _member(worker)
            handle._catch_up()
            far = max(float((a - b).abs().max()) for a, b in zip(worker.ahead(), before, strict=True))
            worker.log[handle._swarm.at] = worker.hash()
            sent = max(float(x.abs().max()) for x in before) > 1e-3
        dist.barrier()
        worker.handle.remove()
        return worker.log, far, sent


@pytest.mark.parametrize("method", ["sparseloco", "dense"])
def test_who_is_late_follows_and_keeps_what_it_has_learnt(ranks: Ranks, method: str) -> None:
    logs, fars, sents = zip(*ranks.run(3, _one_is_late, method), strict=True)
    assert _agree(list(logs)) == {2 * H}
    assert max(fars) < 1e-14
    assert all(sents)


def _never_in_time() -> list[bool]:
    """What is not counted at two outer steps, and then is. Whether that stays and grows, and then moves all."""
    with _store() as store, patch.object(agreement, "FOUNDING", 0.0):
        plain = tw.OuterSteps(every=H, make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        worker = Worker(store, plain).train(H)
        handle, before, after = _member(worker), list[Tensor](), list[Tensor]()
        outcome, send = handle._swarm.outcome, handle._send

        def late(tick: int) -> Any:
            found = outcome(tick)
            assert found is not None
            return found[0]._replace(shares=("another",)), found[1]

        def sends(found: Any) -> None:
            before.append(torch.cat([x.flatten() for x in worker.ahead()]))
            send(found)

        with patch.object(handle, "_send", sends):
            for outcomes in (late, late, outcome):
                with patch.object(handle._swarm, "outcome", outcomes):
                    worker.train(H - 1)
                    common = torch.cat([x.flatten() for x in worker.shared()])
                    worker.train()
                    after.append(torch.cat([x.flatten() for x in worker.ahead()]))
        moved = torch.cat([x.flatten() for x in worker.shared()]) - common
        handle.remove()
        kept = [bool((x - y).abs().max() < 1e-14) for x, y in zip(before, after, strict=True)]
        grows = [bool(x.norm() < y.norm()) for x, y in pairwise(before)]
        return [*kept, *grows, bool((moved + before[-1]).abs().max() < 1e-14)]


def test_who_is_never_in_time_sends_all_that_it_has_learnt_once_it_is(ranks: Ranks) -> None:
    assert ranks.run(1, _never_in_time) == [[True, True, False, True, True, True]]


def _takes_over(at: int, kin: bool) -> tuple[bool, bool, bool, int]:
    """A worker takes over its own state, or that of another start. What stays: what it has learnt, and the common."""
    with _store() as store, patch.object(agreement, "FOUNDING", 0.0), logged() as said:
        worker, states = Worker(store, _sparse()).train(at + 1), list[bytes]()
        handle = _member(worker)
        with patch.object(Swarm, "give", lambda self, state: states.append(state)):
            handle._give()
        handle._learnt, common = True, worker.hash()
        if not kin:
            handle._origin = None
        with patch.object(Swarm, "fetch", lambda self: (at, self.known.view, *states)):
            handle._take_over()
        handle.remove()
        dropped = sum("is dropped" in each for each in said)
        return any(bool(x.any()) for x in worker.ahead()), handle._learnt, worker.hash() == common, dropped


@pytest.mark.parametrize("kin", [True, False])
@pytest.mark.parametrize("at", [H, 0])
def test_who_takes_over_a_state_keeps_what_it_has_learnt_since_they_began_alike(
    ranks: Ranks, at: int, kin: bool
) -> None:
    assert ranks.run(1, _takes_over, at, kin) == [(kin, kin, True, not kin)]


def _is_void(method: str, kept: bool) -> tuple[float, list[str]]:
    """Two outer steps are void. How far what waits then is from all that was learnt since; and what was said."""
    recipe = {"dense": tw.recipes.dense(), "randomk": tw.recipes.randomk(density=0.3, minimum_size=64)}[method]
    steps = tw.OuterSteps(every=H, recipe=recipe, make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    with _store() as store, patch.object(agreement, "FOUNDING", 0.0), logged() as said:
        worker, states = Worker(store, steps).train(H), list[bytes]()
        handle, before = _member(worker), list[Tensor]()
        own = [p for group in worker.optimizer.param_groups for p in group["params"]]
        memories = handle.fragments[0].attachment.recipe.memories()
        names = [name for name, p in worker.model.named_parameters() if p.requires_grad]

        def waiting() -> Tensor:
            held = {n: fields["residual"] for m in memories for n, fields in m.state().items() if "residual" in fields}
            there = [x + held[n].view_as(x) if n in held else x for n, x in zip(names, worker.ahead(), strict=True)]
            return torch.cat([x.flatten() for x in there])

        def learns(optimizer: torch.optim.Optimizer, *_: object) -> None:
            before.append(torch.cat([0.05 * p.grad.flatten() for p in own if p.grad is not None]))

        before.append(waiting())
        with patch.object(Swarm, "give", lambda self, state: states.append(state)):
            handle._give()
        worker.optimizer.register_step_pre_hook(learns)
        worker.train(2 * H + 1)
        if not kept:
            handle._swarm.known.shares.clear()
        with patch.object(Swarm, "fetch", lambda self: (4 * H, self.known.view, *states)):
            handle._take_over()
        far = float((waiting() - sum(before)).abs().max())
        worker.train(H)
        assert (handle._swarm.at, handle.skipped) == (5 * H, 0)
        handle.remove()
        return far, [each for each in said if "is dropped" in each]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("method", ["dense", "randomk"])
def test_what_was_learnt_for_outer_steps_that_are_void_waits_or_is_said_to_be_dropped(
    ranks: Ranks, method: str, kept: bool
) -> None:
    ((far, said),) = ranks.run(1, _is_void, method, kept)
    assert (far < 1e-13) == kept
    assert [f"from tick {2 * H} to {3 * H} are void" in each for each in said] == [True] * (not kept)


def _is_overtaken(counts: bool) -> list[bool]:
    """A state comes while a share is under way, with that in it or not. How far it then is, and whether it goes on."""
    with _store() as store, patch.object(agreement, "FOUNDING", 0.0):
        worker, states = Worker(store, tw.OuterSteps(every=2 * H, delay=2)).train(2 * H + 2), list[bytes]()
        handle, before = _member(worker), list[Tensor]()
        with (
            patch.object(Swarm, "give", lambda self, state: states.append(state)),
            patch.object(handle, "_counted", {handle.name: 4 * H if counts else 2 * H}),
        ):
            handle._give()

        def fetched(swarm: Swarm) -> Any:
            before.extend(worker.ahead())
            return 4 * H, swarm.known.view, *states

        with patch.object(handle._swarm, "outcome", lambda tick: None), patch.object(Swarm, "fetch", fetched):
            worker.train(2 * H)
        after = worker.ahead()
        worker.train(2 * H + 2)
        found = handle._swarm.at == 6 * H and not handle.skipped
        handle.remove()
        kept = all(bool((x - y).abs().max() < 1e-14) for x, y in zip(before, after, strict=True))
        return [any(bool(x.any()) for x in before), kept, any(bool(x.any()) for x in after), found]


@pytest.mark.parametrize("counts", [True, False])
def test_what_was_under_way_is_sent_again_unless_the_state_that_overtakes_it_has_it(ranks: Ranks, counts: bool) -> None:
    assert ranks.run(1, _is_overtaken, counts) == [[True, not counts, not counts, True]]


def _counts_unheard(method: str) -> tuple[list[bool], Log]:
    """Rank 2 is cut off once the others have its share. It counts, and they go on until nobody keeps such old ones."""
    with _store() as store, patch.object(agreement, "KEPT", 0):
        worker, ahead = Worker(store, METHODS[method](), workers=3, grace=60.0, quorum=0.5).train(2 * H), list[bool]()
        swarm, names = _member(worker)._swarm, [""] * 3
        outcome = swarm.outcome
        dist.all_gather_object(names, swarm.id)

        def is_cut_off(tick: int) -> Any:
            with patch.object(swarm._directory, "decide", side_effect=StoreError):
                dist.barrier()
                with _cut_off(swarm):
                    for _ in range(2):
                        dist.barrier()
            ahead.append(any(bool(x.any()) for x in worker.ahead()))
            return outcome(tick)

        if dist.get_rank() == 2:
            with patch.object(swarm, "outcome", is_cut_off):
                worker.train(H)
            ahead.append(any(bool(x.any()) for x in worker.ahead()))
        else:
            _wait(lambda: names[2] in swarm.known.shares[3 * H])
            dist.barrier()
            _wait(lambda: names[2] not in worker.handle.workers)
            dist.barrier()
            worker.train(3 * H)
            dist.barrier()
            worker.train_while_another_does(set(names[:2]))
        worker.handle.remove()
        return ahead, worker.log


@pytest.mark.parametrize("method", ["sparseloco", "dense"])
@pytest.mark.first(1)
def test_a_share_that_counts_while_its_maker_is_cut_off_counts_once(ranks: Ranks, method: str) -> None:
    ahead, logs = zip(*ranks.run(3, _counts_unheard, method), strict=True)
    assert ahead[2] == [True, False]
    assert 3 * H in _agree(list(logs[:2])) - logs[2].keys()
    _agree(list(logs))


def _joins_with_delay() -> int:
    """Rank 1 joins once rank 0 has taken an outer step."""
    with _store() as store:
        if dist.get_rank() == 1:
            dist.barrier()
        worker = Worker(store, tw.OuterSteps(every=2 * H, delay=2), grace=60.0).train(2 * H + 2)
        if dist.get_rank() == 0:
            dist.barrier()
            worker.train_while_another_does({worker.handle.name})
        worker.handle.remove()
        return worker.handle.skipped


@pytest.mark.slow
def test_who_joins_where_exchanges_are_delayed_has_skipped_none(ranks: Ranks) -> None:
    assert ranks.run(2, _joins_with_delay) == [0, 0]


def _gives_amid_an_exchange(method: str, gives: bool) -> tuple[list[dict[str, Any]], int, list[Any]]:
    """The state that a worker gives before an exchange and in it; what is common after it, and the residuals."""
    with _store() as store, patch.object(agreement, "FOUNDING", 0.0):
        worker, given = Worker(store, METHODS[method]()).train(2 * H + 1), list[dict[str, Any]]()
        handle = _member(worker)
        outcome = handle._swarm.outcome

        def waits(tick: int) -> Any:
            handle._give()
            return outcome(tick)

        with patch.object(Swarm, "give", lambda self, state: given.append(unpacked(state)[0])):
            handle._give()
            with patch.object(handle._swarm, "outcome", waits if gives else outcome):
                worker.train(H)
        waiting = [memory.state() for part in handle.fragments for memory in part.attachment.recipe.memories()]
        kept = [x.tolist() for each in waiting for fields in each.values() for x in fields.values()]
        handle.remove()
        return [each["memories"][-1] for each in given], worker.hash(), kept


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.first(1)
def test_a_state_that_is_given_amid_an_exchange_is_that_before_it(ranks: Ranks, method: str) -> None:
    """And the exchange goes on as if it were not."""
    (((before, amid), common, kept),) = ranks.run(1, _gives_amid_an_exchange, method, True)
    assert [before.keys(), amid.keys()] == [amid.keys(), before.keys()]
    assert all(torch.equal(x, amid[name][field]) for name, fields in before.items() for field, x in fields.items())
    assert ranks.run(1, _gives_amid_an_exchange, method, False)[0][1:] == (common, kept)


def _far_away(delay: int) -> bool:
    """Frames are on their way until the worker has taken all steps but one of `delay`, or waits. Whether it waited."""
    send = Link.send
    with _store() as store:
        worker = Worker(store, tw.OuterSteps(every=2 * H, delay=delay), workers=2, grace=60.0)
        swarm = _member(worker)._swarm
        with _held() as flying, ThreadPoolExecutor() as pool:
            trained = pool.submit(worker.train, 2 * H + max(delay - 1, 0))
            _wait(lambda: trained.done() or swarm.waited > 0.0)
            for kind in ("share", "have"):
                _wait(partial(_any_is, kind, flying))
                frames, flying[:] = list(flying), []
                dist.barrier()
                for frame in frames:
                    send(*frame)
            _wait(lambda: swarm.known.last == 2 * H)
            trained.result()
        worker.train(delay and 1)
        assert swarm.at == 2 * H
        dist.barrier()
        worker.handle.remove()
        return swarm.waited > 0.0 or any(swarm.waited_for.values())


def _any_is(kind: str, frames: list[tuple[Link, Words, bytes]]) -> bool:
    return any(words["kind"] == kind for _, words, _ in frames)


@pytest.mark.parametrize("delay", [0, 2])
def test_with_delay_nothing_is_waited_for(ranks: Ranks, delay: int) -> None:
    assert ranks.run(2, _far_away, delay) == [not delay] * 2


def _come_and_go() -> Log:
    """Rank 2 vanishes, rank 3 comes; the others train until they have noticed both, and have gone on."""
    rank = dist.get_rank()
    with _store() as store:
        if rank == 3:
            dist.barrier()
        worker = Worker(store, _sparse(), workers=3, grace=20.0, quorum=0.5)
        known = set(worker.handle.workers)
        if rank < 3:
            worker.train(2 * H)
            dist.barrier()
        match rank:
            case 2:
                worker.handle.remove(goodbye=False)
            case 3:
                worker.model.load_state_dict({n: p + 1 for n, p in worker.handle.parameters.items()}, strict=False)
                assert "after they had joined" in told(worker.train)
                worker.handle.go_back()
                worker.train(4 * H)
            case _:
                worker.train_while_another_does(known)
        worker.handle.remove()
        return worker.log


def test_workers_come_and_go(ranks: Ranks) -> None:
    logs = ranks.run(4, _come_and_go)
    assert len(_agree(logs[:2])) > 2
    assert len(_agree([logs[0], logs[3]])) > 2
    assert len(_agree(logs[:3])) == 2


def _a_share_is_lost() -> Log:
    """Rank 2's share reaches only rank 3. The store decides on it, then rank 2 dies and rank 3 is cut off for long."""
    rank, token = dist.get_rank(), torch.zeros(1)
    with _store() as store:
        worker, names = Worker(store, _sparse(), workers=4, grace=60.0, quorum=0.5).train(2 * H), [""] * 4
        swarm = _member(worker)._swarm
        outcome, broadcast = swarm.outcome, swarm._broadcast
        dist.all_gather_object(names, swarm.id)

        def dies(tick: int) -> None:
            dist.recv(token, 3)
            raise SystemExit

        def is_cut_off(tick: int) -> Any:
            found = outcome(tick)
            with patch.multiple(swarm, take=Mock(side_effect=OSError), status=Mock(side_effect=OSError)):
                for link in list(swarm._links.values()):
                    link.close()
                _wait(lambda: not swarm._links)
                dist.send(token, 2)
                _wait(lambda: bool(swarm._directory.get(f"step {4 * H}")))
            return found

        def sends(words: Any, body: bytes = b"") -> None:
            broadcast(words, body) if body else None  # neither what it has nor what was decided

        match rank:
            case 2:
                only = patch.multiple(swarm, _broadcast=swarm._links[names[3]].send, _pass_on=Mock(), outcome=dies)
                with only, pytest.raises(SystemExit):
                    worker.train(H)
                worker.handle.remove(goodbye=False)
            case 3:
                with patch.multiple(swarm, _broadcast=sends, _pass_on=Mock(), outcome=is_cut_off):
                    worker.train(H)
                worker.train(4 * H)
            case _:
                while 4 * H not in worker.log:
                    worker.train()
                worker.train_while_another_does(set(names[:2]))
        worker.handle.remove()
        return worker.log


@pytest.mark.slow
def test_an_outer_step_is_void_if_only_the_dead_had_its_shares(ranks: Ranks) -> None:
    logs = ranks.run(4, _a_share_is_lost)
    _agree(logs)
    assert [3 * H in log for log in logs] == [False, False, False, True]
    assert logs[0][4 * H] == logs[1][4 * H] == logs[0][2 * H]
    assert max(_agree([logs[0], logs[3]])) > 4 * H


def _resumed(who: str, where: str, alone: bool) -> list[Log]:
    """The logs of a run, and of one that resumes from what its workers had saved in between."""
    path = f"{where}/{dist.get_rank() * alone}"
    with _store() as store:
        worker = Worker(store, METHODS[who.partition(" ")[2]](), workers=2, grace=60.0).train(4 * H + 1)
        saved, common = worker.saved(), worker.hash()
        if where:
            worker.dcp(dcp.save, path, alone=alone)
        random = torch.get_rng_state()
        first = worker.train(2 * H - 1).log
        dist.barrier()
        worker.handle.remove()
    with _store() as store:
        worker = Worker(store, METHODS[who.partition(" ")[2]](), workers=2, grace=60.0)
        if where:
            worker.dcp(dcp.load, path, path, alone=alone)
        elif who.startswith("all") or dist.get_rank() == 0:
            worker.resume(saved)
        assert worker.hash() == common or (who.startswith("one") and dist.get_rank() == 1)
        torch.set_rng_state(random)
        dist.barrier()
        if who.startswith("all"):
            worker.train(2 * H - 1)
            dist.barrier()
        while len(worker.handle.workers) > 1 if dist.get_rank() == 0 else len(worker.log) < 2:
            worker.train()
        before = copy.deepcopy(worker.model.state_dict())
        late = partial(worker.handle.load_state_dict, saved[2])
        if alone:
            late = partial(worker.dcp, dcp.load, path, path, alone=True)
        assert "before the first step" in told(late)
        assert all(torch.equal(x, before[name]) for name, x in worker.model.state_dict().items())
        worker.handle.remove()
        return [first, worker.log]


@pytest.mark.parametrize(
    ("who", "stored", "alone"),
    [
        ("all sparseloco", False, False),
        ("all streaming", False, False),
        ("one sparseloco", False, False),
        ("all sparseloco", True, False),
        ("all streaming", True, True),
    ],
)
@pytest.mark.first(2)
def test_workers_resume_from_what_they_have_saved(
    ranks: Ranks, who: str, stored: bool, alone: bool, tmp_path: Path
) -> None:
    """From files of their own, from one checkpoint of all, or from one each."""
    before, after = zip(*ranks.run(2, _resumed, who, str(tmp_path) if stored else "", alone), strict=True)
    assert _agree(list(after))
    assert min(after[1]) > 4 * H
    if who.startswith("all"):
        assert len({log[6 * H] for log in (*before, *after)}) == 1


def _load_apart(begun: int) -> Log:
    """Rank 1 loads a newer state than rank 0 has loaded, before that one's first outer step or after so many."""
    with _store() as store:
        worker = Worker(store, _sparse(), workers=2, grace=60.0).train(2 * H + 1)
        old = worker.saved()
        new = worker.train(3 * H).saved()
        dist.barrier()
        worker.handle.remove()
    with _store() as store:
        worker = Worker(store, _sparse(), workers=2, grace=1.0, quorum=0.5)
        if dist.get_rank() == 0:
            worker.resume(old)
            worker.train(H * begun)
        dist.barrier()
        if dist.get_rank() == 1:
            _wait(lambda: _member(worker)._swarm.furthest == (2 + begun) * H)  # a load beside their step would be newer
            worker.resume(new)
        dist.barrier()
        while len(worker.handle.workers) > 1 if dist.get_rank() == 0 else len(worker.log) < 3:
            worker.train()
        worker.handle.remove()
        return worker.log


@pytest.mark.parametrize(("begun", "anew"), [(0, [True, True]), (1, [False, False]), (3, [False, True])])
@pytest.mark.first(1)
def test_the_newest_state_that_is_loaded_before_the_first_outer_step_wins(
    ranks: Ranks, begun: int, anew: list[bool]
) -> None:
    """After three, another state of the same tick is loaded."""
    logs = ranks.run(2, _load_apart, begun)
    assert _agree(logs)
    assert [min(log) > 5 * H for log in logs] == anew


def _loads_slowly() -> Log:
    """Rank 1 loads what it has saved, and meanwhile rank 0 trains to that tick if it does not hear of that."""
    with _store() as store:
        worker = Worker(store, _sparse(), workers=2, grace=60.0).train(H)
        saved = worker.saved()
        dist.barrier()
        worker.handle.remove()
    with _store() as store:
        worker = Worker(store, _sparse(), workers=2, grace=60.0, quorum=0.5)
        load, swarm = outer_state.load, _member(worker)._swarm

        def loads(*parts: Any) -> int:
            dist.barrier()
            _wait(lambda: swarm.furthest == H)
            return load(*parts)

        if dist.get_rank() == 1:
            with patch.object(outer_state, "load", loads):
                worker.resume(saved)
        else:
            dist.barrier()
        while len(worker.handle.workers) > 1 if dist.get_rank() == 0 else len(worker.log) < 3:
            worker.train()
        worker.handle.remove()
        return worker.log


def test_others_hear_of_what_is_loaded_before_that_takes_long(ranks: Ranks) -> None:
    assert _agree(ranks.run(2, _loads_slowly))


def _of_a_group(path: str) -> tuple[str, str]:
    """Workers of a group save, and one with a store would load."""
    model = nn.Linear(9, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.outer(model, optimizer, _sparse())
    dcp.save({"thinwire": tw.Checkpoint(handle)}, checkpoint_id=path)
    saved = handle.state_dict()
    handle.remove()
    with _store() as store:
        handle = tw.outer(model, optimizer, _sparse(), store=store, workers=2)
        state = {"thinwire": tw.Checkpoint(handle, path)}
        said = told(partial(dcp.load, state, checkpoint_id=path, process_group=handle.group))
        alone = told(partial(handle.load_state_dict, saved))
        handle.remove()
        return said, alone


def test_what_a_group_has_saved_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Each worker would take the residuals of all."""
    for stored, alone in ranks.run(2, _of_a_group, str(tmp_path)):
        assert stored.startswith("StateError: nothing was loaded")
        assert alone.startswith("ValueError: this was saved by a process group of 2 workers")
        assert all("without store=" in said for said in (stored, alone))


def _one_is_started_again() -> Log:
    """Rank 1 joins anew with what it had saved, when rank 0 has gone on."""
    rank = dist.get_rank()
    with _store() as store:
        worker = Worker(store, _sparse(), workers=2, quorum=0.5, grace=1.0).train(2 * H + 1)
        saved = worker.saved()
        dist.barrier()
        if rank:
            worker.handle.remove(goodbye=False)
            dist.barrier()
            worker = Worker(store, _sparse(), quorum=0.5, grace=1.0)
            worker.resume(saved)
            assert worker.handle.ticks > 2 * H + 1
            assert not any(x.any() for x in worker.ahead())
            worker.train(3 * H)
        else:
            worker.train(3 * H)
            known = set(worker.handle.workers)
            dist.barrier()
            worker.train_while_another_does(known)
        worker.handle.remove()
        return worker.log


def test_who_is_started_again_goes_on_with_the_others(ranks: Ranks) -> None:
    assert len(_agree(ranks.run(2, _one_is_started_again))) > 1


def _store_restarts() -> Log:
    """The store's host is started anew in mid-training; then rank 2 joins by it."""
    rank, port = dist.get_rank(), torch.zeros(1, dtype=torch.int64)
    first = _lasting_store() if rank == 0 else None
    port.fill_(first.port if first else 0)
    dist.broadcast(port, 0)
    store = f"tcp://127.0.0.1:{int(port)}"
    worker = Worker(store, _sparse(), workers=2, quorum=0.5).train(2 * H) if rank < 2 else None
    known = set(worker.handle.workers) if worker else set()
    dist.barrier()
    del first
    second = MADE.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False) if rank == 0 else None
    dist.barrier()
    if worker:
        worker.train_while_another_does(known)
    else:
        worker = Worker(store, _sparse(), workers=3)
        while len(worker.handle.workers) < 3:
            worker.train()
        worker.train(3 * H)
    worker.handle.remove()
    dist.barrier()
    assert rank or second
    return worker.log


def test_the_store_may_be_started_anew(ranks: Ranks) -> None:
    assert len(_agree(ranks.run(3, _store_restarts))) > 1


def _others_in_one_store() -> list[int]:
    with _store() as store:
        runs = [Directory(store, run) for run in ("", "one", "another", "one")]
        found = [len(each.register({"id": str(number)})) for number, each in enumerate(runs)]
        for each in runs:
            each.close()
        return found


def test_who_has_another_certificate_finds_nobody(ranks: Ranks) -> None:
    assert ranks.run(1, _others_in_one_store) == [[0, 0, 0, 1]]


def _without_statistics() -> tuple[str, bool]:
    """Rank 1 lacks buffers at the first outer step, and has it at the next: what is said, and whether both agree."""
    with _store() as store:
        worker = Worker(store, tw.OuterSteps(every=H), workers=2, quorum=0.5, grace=0.1)
        worker.train(H - 1)
        held = dict(worker.frozen._buffers)
        if dist.get_rank() == 1:
            worker.frozen.running_mean = worker.frozen.running_var = None
        said = told(worker.train)
        worker.frozen._buffers |= held
        dist.barrier()
        worker.train(H)
        return said, worker.handle.verify_replicas()


def test_running_statistics_that_are_turned_off_are_refused_there_alone(ranks: Ranks) -> None:
    (nothing, together), (said, agrees) = ranks.run(2, _without_statistics)
    assert (nothing, together, agrees) == ("nothing", True, True)
    assert "RuntimeError: the buffer '1.running_mean' is gone" in said


def _interrupted(goes_on: str) -> float:
    """Rank 1 is interrupted while it waits, and moves later: how far the next outer step moves what is common."""
    steps = tw.OuterSteps(every=H, make_optimizer=partial(torch.optim.SGD, lr=1.0))
    with _store() as store:
        worker = Worker(store, steps, workers=2, grace=60.0).train(H - 1)
        if dist.get_rank():
            with patch.object(Swarm, "outcome", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
                worker.train()
            worker.optimizer.param_groups[0]["lr"] = 0.0
            if goes_on == "saves":
                worker.handle.state_dict()
                assert not any(bool(x.any()) for x in worker.ahead())
            worker.train()
            first = next(worker.model.parameters())
            before = float(worker.shared()[0].mean())
            first.detach().add_(1.0)
            worker.train(H - 1)
        else:
            worker.train()
            worker.optimizer.param_groups[0]["lr"] = 0.0
            before = float(worker.shared()[0].mean())
            worker.train(H)
        dist.barrier()
        assert worker.handle.verify_replicas()
        dist.barrier()
        worker.handle.remove()
        return round(float(worker.shared()[0].mean()) - before, 6)


@pytest.mark.parametrize("goes_on", ["saves", "trains"])
def test_who_is_interrupted_while_it_waits_loses_nothing(ranks: Ranks, goes_on: str) -> None:
    assert ranks.run(2, _interrupted, goes_on) == [0.5, 0.5]


def _named_sick() -> tuple[str, dict[int | str, int], list[str]]:
    with _store() as store, logged() as said:
        worker = Worker(store, tw.OuterSteps(every=H), workers=2, grace=60.0).train(H)
        if dist.get_rank() == 1:
            next(worker.model.parameters()).detach().fill_(math.nan)
        worker.train(H)
        dist.barrier()
        worker.handle.remove()
        return worker.handle.name, worker.handle.left_out, [text for text in said if "not finite" in text]


def test_a_sick_worker_is_called_by_its_name(ranks: Ranks) -> None:
    (_, *one), (name, *other) = ranks.run(2, _named_sick)
    assert one == other == [{name: 1}, [f"Δ of worker {name} is not finite (time 1): left out of the outer step"]]


def _with_a_buffer(frozen: int) -> tuple[str, float]:
    """What is said where a worker has a random buffer, and so large a frozen parameter, and what is in the former."""
    torch.manual_seed(dist.get_rank())
    model, made = nn.Linear(4, 4), list[Any]()
    model.register_buffer("features", torch.randn(4))
    model.register_parameter("frozen", nn.Parameter(torch.zeros(frozen), requires_grad=False))
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    with _store() as store:
        said = told(lambda: made.append(tw.outer(model, optimizer, _sparse(), store=store, workers=2, grace=60.0)))
        dist.barrier()
        for handle in made:
            handle.remove()
        return said, float(model.get_buffer("features").sum())


def test_who_joins_gets_buffers_too(ranks: Ranks) -> None:
    """Such as random features, without which it would train another function."""
    (said, one), (_, other) = ranks.run(2, partial(_with_a_buffer, 3))
    assert (said, one) == ("nothing", other)


def _with_other_frozen_ones() -> tuple[str, float]:
    return _with_a_buffer(1 + dist.get_rank())


def test_another_frozen_parameter_is_refused(ranks: Ranks) -> None:
    for said, _ in ranks.run(2, _with_other_frozen_ones):
        assert re.search(r"FingerprintError: .*frozen: \(1,\)", said)


def _with_a_setting() -> str:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = tw.OuterSteps(
        every=H, make_optimizer=lambda parameters: torch.optim.SGD([{"params": parameters, "kind": torch.float64}])
    )
    return told(partial(tw.outer, model, optimizer, steps, store="tcp://127.0.0.1:1"))


def test_an_outer_optimizer_that_nobody_could_be_given_is_refused(ranks: Ranks) -> None:
    """Not where somebody joins: that would stop whoever gives it a state."""
    assert ranks.run(1, _with_a_setting)[0].startswith("TypeError: a state holds torch.float64")


def _alone_in_another_group() -> str:
    """The backend of a worker's own group where the default one might be NCCL, whose messages no host can read."""
    with _store() as store, patch.object(dist, "new_group", wraps=dist.new_group) as made:
        worker = Worker(store, _sparse(), workers=1)
        worker.handle.remove()
        return str(made.call_args.kwargs["backend"])


def test_a_workers_own_group_is_of_gloo(ranks: Ranks) -> None:
    with patch.object(agreement, "FOUNDING", 0.1):
        assert ranks.run(1, _alone_in_another_group) == ["gloo"]


def _of_another_version() -> str:
    with _store() as store, patch.object(outer, "__version__", f"{dist.get_rank()}"):
        said = told(partial(Worker, store, _sparse(), workers=2))
        dist.barrier()
        return said


def test_another_version_is_refused(ranks: Ranks) -> None:
    """Its shares may be laid out otherwise, and all workers would raise as they read one."""
    assert any("thinwire 0" in said and "thinwire 1" in said for said in ranks.run(2, _of_another_version))


def test_who_is_interrupted_while_it_fetches_is_there() -> None:
    with _swarms(2) as (one, other):
        other.stand(0, {}, dict.fromkeys(one.workers, True))
        one.stand(0, {}, dict.fromkeys(one.workers, True))
        _wait(lambda: one.furthest == 0)
        other.known.decisions[1] = Decision(1, (other.id,), other.known.view)
        other.stand(1, {})
        _wait(lambda: one.furthest == 1)
        with patch.object(one, "_heard", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            one.fetch()
        assert one.status()["at"] == 0


def test_terms_may_be_long() -> None:
    """As of a model of many experts: beyond what the words of a frame may have."""
    with _swarms(2, terms="x" * 2 * links._MOST_WORDS) as found:
        assert all(len(each.workers) == 2 for each in found)


@contextmanager
def _swarms(count: int, lost: float = 1.0, terms: str = "", **options: Any) -> Iterator[list[Swarm]]:
    """So many workers in a process, which have met. None has a state."""
    KEPT[:] = [_lasting_store()]
    chosen: dict[str, Any] = {"workers": count, "quorum": 1.0, "grace": 0.1} | options
    with patch.object(agreement, "LOST", lost):
        found = [Swarm(f"tcp://127.0.0.1:{KEPT[0].port}", terms, lambda tick: tick + 1, **chosen) for _ in range(count)]
        _wait(lambda: all(len(each.workers) == count for each in found))
        yield found
        for each in found:
            each.close(goodbye=True)


def _wait(until: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60.0
    while not until():
        assert time.monotonic() < ends
        time.sleep(0.01)


def _began(swarms: list[Swarm], waited_for: list[bool]) -> list[Swarm]:
    """The same workers at tick 0, with a view of this."""
    for each in swarms:
        each.stand(0, {}, {peer.id: waits for peer, waits in zip(swarms, waited_for, strict=True)})
    _wait(lambda: all(len(each.known.status) == len(swarms) - 1 and each._all_have_a_state() for each in swarms))
    return swarms


def _shares_of(one: Swarm, tick: int = 1) -> set[str]:
    """Of whose shares an outer step is made, in which this worker takes part."""
    one.send(tick, b"share", 0.0)
    found = one.outcome(tick)
    assert found is not None
    one.stand(tick, {})
    return set(found[0].shares)


@contextmanager
def _held() -> Iterator[list[tuple[Link, Words, bytes]]]:
    """Frames that links are to send while they are held up, but for what they say by themselves."""
    flying: list[tuple[Link, Words, bytes]] = []
    with patch.object(Link, "send", lambda link, words, body=b"": flying.append((link, words, body))):
        yield flying


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_an_exchange_takes_two_trips(workers: int) -> None:
    """All that is on its way arrives, then what was said to it. Each worker sends its share once to each other."""
    slow = (
        patch.multiple(agreement, STALLED=1000.0, FOUNDING=1000.0),
        patch.multiple(links, SILENCE=60.0, CONNECTIONS=1),
    )
    send, take = Link.send, Swarm.take
    with slow[0], slow[1], _swarms(workers, lost=1000.0, grace=1000.0) as swarms:
        arrived = list[str]()

        def takes(swarm: Swarm, link: Link, words: Words, body: bytes) -> None:
            take(swarm, link, words, body)
            arrived.append(words["kind"])

        _began(swarms, [True] * workers)
        with _held() as flying, patch.object(Swarm, "take", takes):
            for each in swarms:
                each.send(1, b"share", 0.0)
            for trip in range(2):
                frames, flying[:], arrived[:] = list(flying), [], []
                shares = Counter(link for link, _, body in frames if body)
                assert set(shares.values()) == (set() if trip else {1})
                assert len(shares) == (0 if trip else workers * (workers - 1))
                assert all(each.known.last == 0 for each in swarms)
                for frame in frames:
                    send(*frame)
                _wait(partial(_all_there, arrived, len(frames)))
            assert all(each.known.last == 1 for each in swarms)
            outcomes = [each.outcome(1) for each in swarms]
        assert all(found and len(found[1]) == workers for found in outcomes)
        assert not any(each.waited for each in swarms)


def _all_there(arrived: list[str], count: int) -> bool:
    return sum(kind != "status" for kind in arrived) == count


def test_who_has_no_state_is_not_waited_for() -> None:
    with _swarms(2, quorum=1.0, grace=60.0) as (one, other):
        one.stand(0, {}, dict.fromkeys(one.workers, True))
        assert _shares_of(one) == {one.id}
        assert other.at == -1


@pytest.mark.parametrize("first", [True, False], ids=["the first are", "the last are"])
@pytest.mark.parametrize(
    ("workers", "late", "enough"),
    [(2, 1, True), (3, 1, True), (3, 2, False), (4, 1, True), (4, 2, False), (8, 2, True), (8, 3, False)],
)
def test_how_many_may_be_late(workers: int, late: int, enough: bool, first: bool) -> None:
    """By default: the others go on after `grace` if they are enough, else once the late ones are long overdue."""
    options, now = signature(tw.outer).parameters, 1000.0
    names = "abcdefgh"[:workers]
    missing = names[:late] if first else names[-late:]
    here = tuple(name for name in names if name not in missing)
    with patch.object(agreement, "monotonic", lambda: now):
        known = [Agreement(name, lambda tick: tick + 1, options["quorum"].default, 5.0) for name in here]
        for each in known:
            each.at, each.reached, each.seconds, each.sent = 0, 1, 1.0, (1, now)
            each.begin(0, dict.fromkeys(names, True))
            each.status = {name: Standing(0, 1.0) for name in names if name != each.own}
            each.shares[1] = {name: Share(b"", 1.0, 0) for name in here}
        assert not any(each.proposal() or each.votes() for each in known)
        now += 4.9
        assert not any(each.proposal() for each in known)
        now += 0.2 if enough else 27.0
        found, *others = [each.proposal() for each in known]
        assert found is not None
        assert not any(others)  # it is not their turn yet
        assert (found.shares, {name for name, waits in found.view.items() if waits}) == (here, set(here))
        now += agreement.TURN * workers
        assert all(each.proposal() == found for each in known)


def test_who_was_late_twice_is_waited_for_once_it_was_in_time() -> None:
    """It computes as fast as the others; its shares travel for so many seconds."""
    now, waited = 0.0, list[float]()
    with patch.object(agreement, "monotonic", lambda: now):
        one = Agreement("one", lambda tick: tick + 1, 0.5, 5.0)
        one.begin(0, {"one": True, "far": True})
        for tick, travels in enumerate([6.0, 6.0, 6.0, 6.0, 4.0, 4.0, 6.0, 6.0, 6.0], start=1):
            began, one.at, one.status = now, tick - 1, {"far": Standing(tick - 1, 1.0)}
            one.times[tick] = now
            one.sent, one.reached, one.shares[tick]["one"] = (tick, now), tick, Share(b"", 1.0, 0)
            while one.last < tick or now < began + 10.0:
                if now == began + travels:
                    one.arrive(tick, "far", Share(b"", 1.0, 0))
                one.have[tick] |= {"far"} if one.votes() else set()
                one.count()
                if one.last < tick and (proposal := one.proposal()):
                    one.learn(proposal)
                if one.last == tick and len(waited) < tick:
                    waited.append(now - began)
                now += 0.5
        assert waited == [5.0, 5.0, 0.0, 0.0, 0.0, 4.0, 5.0, 5.0, 0.0]
        one.times, one.sent = {8: now - 5.5, 9: now - 5.0}, (10, now)  # outer steps may take less than `grace`
        for tick, late in ((8, 2), (9, 0)):
            one.arrive(tick, "far", Share(b"", 1.0, 0))
            assert one.late["far"] == late


def test_who_has_not_met_all_yet_does_not_go_on_without_them() -> None:
    with _swarms(3, lost=1000.0, quorum=0.5, grace=60.0) as swarms, patch.object(agreement, "TURN", 0.0):
        one, other, far = _began(swarms, [True, True, True])
        with other._changed:
            del other._links[far.id], other.known.status[far.id]
        for each in (one, other):
            each.send(1, b"share", 0.0)
        _wait(lambda: len(other.known.shares[1]) == 2 and other.known.reached == 1)
        with other._changed:
            assert other.known.proposal() is None
            with patch.object(agreement, "FOUNDING", 0.0):
                assert other.known.proposal() is not None


@pytest.mark.parametrize("waited_for", [[True, False], [True, True]])
@pytest.mark.parametrize("dies", [False, True])
def test_who_is_stuck_or_dead_holds_up_nobody(waited_for: list[bool], dies: bool) -> None:
    """Not even a slow worker for which it has not waited itself."""
    with _swarms(2) as swarms:
        stuck, other = _began(swarms, waited_for)
        if dies:
            stuck.close(goodbye=False)
        assert _shares_of(other) == {other.id}


def test_a_share_that_only_a_dead_worker_held_blocks_nobody() -> None:
    """It has all shares, and none has reached the others of its own, so it must not decide that they count."""
    with _swarms(3, lost=1000.0, quorum=0.5, grace=0.0) as swarms, patch.multiple(agreement, TURN=0.0, STALLED=0.0):
        lonely, *others = _began(swarms, [True, True, True])
        for each in others:
            each.known.grace = 1000.0
            each.send(1, b"share", 0.0)
        with (
            patch.object(lonely, "_broadcast"),  # as if its upload were slow
            patch.object(lonely.known, "proposal", wraps=lonely.known.proposal) as proposals,
        ):
            _wait(lambda: len(lonely.known.shares[1]) == 2)
            lonely.send(1, b"share", 0.0)
            seen = proposals.call_count
            _wait(lambda: proposals.call_count > seen + 5)
            lonely.close(goodbye=False)
        for each in others:
            each.known.grace = 0.0
        _wait(lambda: all(each.known.last == 1 for each in others))
        assert {each.known.decisions[1].shares for each in others} == {tuple(sorted(each.id for each in others))}


def test_parameters_are_compared_with_those_of_the_others() -> None:
    """After the latest outer step that both have taken."""
    with _swarms(3) as swarms:
        _, ahead, wrong = _began(swarms, [True] * 3)
        for each in swarms:
            each.stand(1, {"weight": 5, "bias": 7 + (each is wrong)}, each.known.view)
        ahead.stand(2, {"weight": 6, "bias": 9}, ahead.known.view)
        assert swarms[0].differing({"weight": 5, "bias": 7}) == ahead.differing({"weight": 6, "bias": 9}) == ["bias"]
        wrong.stand(3, {"weight": 6, "bias": 9}, wrong.known.view)
        wrong._compared._own = {3: wrong._compared._own[3]}
        assert ahead.differing({"weight": 6, "bias": 9}) == []
        assert ahead.differing({"weight": 0, "bias": 9}) == []
        ahead.stand(3, {"weight": 6, "bias": 9}, ahead.known.view)
        assert ahead.differing({"weight": 0, "bias": 9}) == ["weight"]


def test_who_is_gone_is_named_as_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    with _swarms(3) as swarms, patch.object(agreement, "FOUNDING", 0.0):
        one, _, gone = _began(swarms, [True] * 3)
        gone.close(goodbye=False)
        _wait(lambda: gone.id not in one.known.status)
        with caplog.at_level(logging.WARNING, logger="thinwire"):
            assert one.differing({}) == []
    assert f"not compared with {gone.id}," in caplog.text


def test_the_store_is_not_asked_about_who_is_slow() -> None:
    with _swarms(3, grace=60.0) as swarms:
        for each in swarms[1:]:
            each.known.seconds = 1000.0
        one, slow, late = _began(swarms, [True, False, False])
        assert _shares_of(one) == {one.id}
        assert not one._directory.get("step 1")
        with patch.object(late, "_consider", lambda *said: None):  # as if shares arrived late
            assert _shares_of(one, 2) == {one.id}
            assert one._directory.get("step 2")
            assert _shares_of(one, 3) == {one.id}
        assert one.known.view == {one.id: True, slow.id: False}


def test_who_is_stuck_is_not_the_only_one_asked_for_a_state() -> None:
    with _swarms(3) as swarms:
        *both, late = swarms
        for each in both:
            each.stand(0, {}, dict.fromkeys([one.id for one in both], True))
        _wait(lambda: all(late.known.status[one.id].at == 0 for one in both))
        well = min(both, key=lambda one: one.id)  # the other is asked first
        with ThreadPoolExecutor() as pool:
            fetched = pool.submit(late.fetch)
            _wait(lambda: bool(well.wanting))
            well.give(b"state")
            assert (fetched.result(60.0) or ())[2:] == (b"state",)


def test_seconds_in_which_a_worker_was_stopped_are_not_waited_for() -> None:
    stopped = [0.0]
    with (
        patch.object(awake, "time", Mock(monotonic=lambda: time.monotonic() + stopped[0])),
        _swarms(2, lost=1000.0) as swarms,
        ThreadPoolExecutor() as pool,
    ):
        one, late = _began(swarms, [True, True])
        fetched = pool.submit(late.fetch)
        _wait(lambda: late._fetches)
        stopped[0] = 10_000.0
        with patch.object(late, "_heard", wraps=late._heard) as looks:
            _wait(lambda: looks.call_count > 1)
        one.stand(1, {}, {one.id: True})
        _wait(lambda: bool(one.wanting))
        one.give(b"state")
        assert (fetched.result(60.0) or ())[2:] == (b"state",)


def test_who_takes_over_a_state_is_not_waited_for() -> None:
    with _swarms(2, lost=1000.0, quorum=1.0, grace=1000.0) as swarms, ThreadPoolExecutor() as pool:
        one, late = _began(swarms, [True, True])
        fetched = pool.submit(late.fetch)
        assert _shares_of(one) == {one.id}
        _wait(lambda: bool(one.wanting))
        one.give(b"state")
        assert (fetched.result(60.0) or ())[2:] == (b"state",)


def test_a_state_that_comes_too_late_is_not_gone_back_to() -> None:
    with _swarms(2, lost=1000.0, quorum=1.0, grace=1000.0) as swarms, ThreadPoolExecutor() as pool:
        one, late = _began(swarms, [True, True])
        fetched = pool.submit(late.fetch)
        assert _shares_of(one) == {one.id}
        _wait(lambda: bool(one.wanting))
        stale = {"kind": "state", "tick": 0, "view": one.known.view, "training": "", "begun": False}
        one._links[late.id].send(stale, b"asked for earlier")
        one.give(b"state")
        assert (fetched.result(60.0) or ())[2:] == (b"state",)


def test_who_takes_over_from_one_that_dies_goes_on_from_its_own_state() -> None:
    with _swarms(2) as swarms, ThreadPoolExecutor() as pool:
        one, late = _began(swarms, [True, True])
        late.send(1, b"share", 0.0)
        assert _shares_of(one) == {one.id, late.id}
        _wait(lambda: late.known.last == 1)
        late.known.decisions.clear()  # as if it were too late for them
        fetched = pool.submit(late.fetch)
        _wait(lambda: bool(one.wanting))
        one.close(goodbye=False)
        assert fetched.result(60.0) == (2, {late.id: True}, b"")


def test_who_waits_for_those_without_a_state_gives_them_its_own() -> None:
    """They elect, and cannot before they have it."""
    with _swarms(3, lost=1000.0, quorum=0.5) as (one, *others), ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())
        for each in (one, *others):
            stack.callback(setattr, each, "_error", StoreError())  # or a test that fails would wait for it
        one.stand(0, {}, dict.fromkeys(one.workers, True))
        one.gives = lambda: one.give(b"state")
        one.send(1, b"share", 0.0)
        waiting = pool.submit(one.outcome, 1)
        _wait(lambda: all(each.furthest == 0 for each in others))  # else nobody is there to fetch from
        fetched = [pool.submit(each.fetch) for each in others]
        assert [(found.result(60.0) or ())[2:] for found in fetched] == [(b"state",)] * 2
        for each in others:
            each.stand(0, {}, one.known.view)
        assert waiting.result(60.0) is not None


def test_who_only_heard_that_others_that_died_had_gone_on_takes_the_step_itself() -> None:
    with _swarms(2, lost=1000.0, quorum=0.5) as (one, late), ExitStack() as stack:
        _began([one, late], [True, True])
        stack.enter_context(patch.multiple(late, _take_decided=Mock(), _consider=Mock()))
        assert _shares_of(one) == {one.id}
        _wait(lambda: late.missed() == 1)
        pool = stack.enter_context(ThreadPoolExecutor())
        stack.callback(setattr, late, "_error", StoreError())  # or a test that fails would wait for it
        waiting = pool.submit(late.outcome, 1)
        _wait(lambda: late.waited > 0.0)
        one.close(goodbye=False)
        assert waiting.result(60.0) is None
        assert pool.submit(late.fetch).result(60.0) is None
        assert late.missed() is None


def test_a_link_that_ends_after_long_is_made_anew() -> None:
    with _swarms(2) as swarms:
        before = {link for one in swarms for link in one._links.values()}
        for one in swarms:
            one._dialled = dict.fromkeys(one._dialled, -math.inf)
        next(iter(before)).close()
        _wait(lambda: all(one._links and before.isdisjoint(one._links.values()) for one in swarms))


def test_the_last_one_goes_on_though_the_store_was_restarted() -> None:
    with _swarms(3) as swarms:
        one, *others = _began(swarms, [True, True, True])
        with patch.object(one._directory, "_trusted", "another life"), patch.object(one._directory, "trust"):
            for each in others:
                each.close(goodbye=True)
            assert _shares_of(one) == {one.id}


def test_a_restarted_store_that_must_not_decide_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    store = MADE.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with closing(Directory(store)) as one:
        one.register({"id": "one"})
        one._trusted = "another life"
        for _ in range(2):
            with pytest.raises(ConnectionError, match="more than half"):
                one.decide("key", "value", most=lambda: False)
            assert not one.is_new()
        assert caplog.text.count("was started anew") == 1
        assert not one.get("key")
        assert (
            one.decide("key", "value", most=lambda: True) == one.decide("key", "other", most=lambda: False) == "value"
        )


def test_who_wakes_does_not_decide_what_others_may_have_decided() -> None:
    """It was stopped while it asked a store, which was restarted meanwhile: it is alone, and then behind the others."""
    known = Agreement("one", lambda tick: tick + 1, 0.5, 0.0)
    known.begin(0, dict.fromkeys(("one", "other", "third"), True))
    with _seats(1) as (restart, _, (held,)):
        one = held._directory
        one.register({"id": "one"})
        known.status |= dict.fromkeys(("other", "third"), Standing(0, 0.0))
        assert known.is_majority()
        restart()
        for peer in ("other", "third"):
            del known.status[peer]
            known.lost[peer] = awake.monotonic(), True
        with pytest.raises(ConnectionError, match="more than half"):
            one.decide("step 1", "of one alone", most=known.is_majority)
    known.status |= dict.fromkeys(("other", "third"), Standing(1, 0.0, 1))
    assert not known.is_majority()
    known.learn(Decision(1, ("other", "third"), known.view))
    assert known.is_majority()


def test_an_elector_that_was_never_met_is_not_waited_for_for_ever() -> None:
    """It died before this worker came, and the store has forgotten since."""
    known = Agreement("one", lambda tick: tick + 1, 0.5, 0.0)
    known.begin(0, dict.fromkeys(("one", "other", "dead", "too"), True))
    known.status["other"] = Standing(0, 0.0)
    assert not known.is_majority()
    known.began -= agreement.GIVEN_UP
    assert known.is_majority()
    del known.status["other"]
    known.lost["other"] = awake.monotonic(), True
    assert not known.is_majority()


def test_who_was_gone_and_is_back_counts_although_it_does_not_know_of_the_new_store() -> None:
    known = Agreement("one", lambda tick: tick + 1, 0.5, 0.0)
    known.begin(0, dict.fromkeys(("one", "other", "third"), True))
    known.life = "2"
    for peer, silent in (("other", True), ("third", False)):
        known.lost[peer] = awake.monotonic() - 2 * agreement.GIVEN_UP, silent
        known.status[peer] = Standing(0, 0.0, life="1")
    assert not known.is_majority()
    known.status["other"] = Standing(0, 0.0, life="2")
    assert known.is_majority()


def test_who_has_said_otherwise_proposes_nothing() -> None:
    store = MADE.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with closing(Directory(store)) as one:
        one.register({"id": "one"})
        with pytest.raises(ConnectionError, match="said otherwise"):
            one.decide("key", "value", most=lambda: True, binds=lambda: False)
        assert not one.get("key")
    known = Agreement("one", lambda tick: tick + 1, 1.0, 0.0)
    known.begin(0, {"one": True, "other": True})
    known.status["other"] = Standing(0, 0.0)
    known.shares[1] = dict.fromkeys(("one", "other"), Share(b"", 0.0, 0))
    assert known.votes()
    assert not known.binds(Decision(1, ("one",), {"one": True}))
    assert known.binds(Decision(1, ("one", "other"), known.view))
    known.count()
    known.learn(Decision(1, ("one", "other"), known.view))
    assert not known.binds(Decision(1, ("one", "other"), known.view))
    known.shares[2] = dict.fromkeys(("one", "other"), Share(b"", 0.0, 0))
    assert known.binds(Decision(2, ("one",), {"one": True}))
    assert not known.votes()


def test_a_restarted_store_is_trusted_while_others_are_there() -> None:
    with _swarms(3) as swarms:
        one, *others = _began(swarms, [True, True, True])
        one._directory._trusted = "another life"
        _wait(lambda: one._directory._trusted == one._directory.life)
        for each in others:
            each.close(goodbye=False)
        assert _shares_of(one) == {one.id}


def test_what_a_worker_takes_next_is_kept_while_the_others_go_on() -> None:
    with _swarms(2) as swarms, patch.object(agreement, "KEPT", 0):
        one, other = _began(swarms, [True, False])
        assert _shares_of(one) == {one.id}
        assert other.outcome(1) is not None
        for tick in (2, 3):
            assert _shares_of(one, tick) == {one.id}
        _wait(lambda: other.known.last == 3)
        other.stand(1, {})
        assert other.at == 1


def test_a_store_that_is_gone_is_said_once_and_ends_the_training_when_it_is_needed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Until then training goes on, also with who is late, and without who has just come."""
    with _swarms(3, quorum=0.5) as swarms, caplog.at_level(logging.WARNING, logger="thinwire"):
        *both, new = _began(swarms, [True, True, False])
        with patch.object(links, "SILENCE", 60.0), patch.object(agreement, "LOST", 1000.0):
            one, late = both
            _end_store(swarms)
            for tick in (1, 2):
                one.send(tick, b"share", 0.0)
                _wait(
                    lambda: one._directory._lacking > 0.0
                )  # the other is late, so that it would propose to go on without
                late.send(tick, b"share", 0.0)
                for each in swarms:
                    found = each.outcome(tick)
                    assert found is not None
                    assert set(found[0].shares) == {one.id, late.id}
                    each.stand(tick, {})
            said = [record.message for record in caplog.records]
            assert [sum(word in each for each in said) for word in ("does not answer", "a worker is late")] == [3, 1]
            assert all("tcp://127.0.0.1" in each for each in said)
            late.close(goodbye=False)
            with ThreadPoolExecutor() as pool:
                for each in (one, new):
                    each._directory.patience = 0.0
                    each.send(3, b"share", 0.0)
                for raised in [pool.submit(told, each.outcome, 3) for each in (one, new)]:
                    said = [raised.result(60.0)]
                    assert said[0].startswith("StateError: 1 of 3 workers are gone, and only the store at tcp://127")
                    assert "Start a new store" in said[0]


def test_without_a_store_a_share_beside_those_that_are_waited_for_stops_nobody() -> None:
    with _swarms(3, lost=1000.0, quorum=0.5) as swarms, ExitStack() as stack:
        stack.enter_context(patch.object(links, "SILENCE", 60.0))
        *both, beside = _began(swarms, [True, True, False])
        pool = stack.enter_context(ThreadPoolExecutor())
        for each in swarms:
            stack.callback(setattr, each, "_error", StoreError())  # or a test that fails would wait for it
        _end_store(swarms)
        beside.send(1, b"share", 0.0)
        _wait(lambda: all(beside.id in each.known.shares[1] for each in swarms))
        for each in both:
            each.send(1, b"share", 0.0)
        for found in [pool.submit(each.outcome, 1) for each in swarms]:
            outcome = found.result(60.0)
            assert outcome is not None
            assert set(outcome[0].shares) == {each.id for each in both}


def _end_store(swarms: list[Swarm]) -> None:
    """End it, and wait until all know."""
    KEPT.clear()
    _wait(lambda: all(each.known.alone for each in swarms))


def test_a_store_that_nobody_else_holds_goes_on() -> None:
    store = MADE.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    swarm = Swarm(store, "", lambda tick: tick + 1, workers=1, quorum=1.0, grace=0.1)
    del store
    assert not swarm._directory.is_new()
    swarm.close(goodbye=True)


def test_who_looks_for_others_raises_if_the_store_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with _swarms(2, patience=0.0) as swarms, ThreadPoolExecutor() as pool:
        looking = [pool.submit(told, each.found) for each in swarms]
        with patch.object(Seat, "take", side_effect=StoreError):
            _end_store(swarms)
            assert "does not answer" in caplog.text
            assert "training goes on" not in caplog.text
            assert all("nobody has begun" in raised.result(60.0) for raised in looking)


@pytest.mark.slow
def test_a_worker_with_a_dead_store_ends_in_peace() -> None:
    """Without a word to anybody: no thread of C++ is ended with it, and torch logs nothing."""
    script = """
import logging, torch, torch.distributed as dist, thinwire as tw
from thinwire.integrations.workers import agreement, directory
logging.basicConfig()
agreement.FOUNDING = 0.0
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
model = torch.nn.Linear(9, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
handle = tw.outer(model, optimizer, tw.outer_steps.sparseloco(every=1), store=f"tcp://127.0.0.1:{store.port}")
model(torch.ones(9)).sum().backward()
optimizer.step()
del store
while not handle._swarm._directory.away:
    pass
optimizer.step()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert len(ended.stderr.splitlines()) == 1
    assert "does not answer" in ended.stderr


def test_who_leaves_while_it_waits_is_told_so() -> None:
    """As where a signal's handler calls remove()."""
    with _swarms(2, grace=60.0) as (one, other), ThreadPoolExecutor() as thread:
        _began([one, other], [True, True])
        one.send(1, b"", 1.0)
        waits = thread.submit(one.outcome, 1)
        _wait(lambda: one.id in other.known.shares[1])
        one.close(goodbye=True)
        with pytest.raises(tw.errors.StateError, match="this worker has left"):
            waits.result(60.0)


def test_who_has_just_joined_goes_on_though_all_others_leave() -> None:
    """As where one machine takes the place of another."""
    with _swarms(3, lost=1000.0) as (one, other, joined):
        for each in (one, other, joined):
            each.stand(0, {}, {one.id: True, other.id: True})
        _wait(lambda: all(each._all_have_a_state() for each in (one, other, joined)))
        one.close(goodbye=True)
        _wait(lambda: one.id not in other.known.status)
        other.close(goodbye=True)
        _wait(lambda: not joined.known.status)
        assert _shares_of(joined) == {joined.id}


def test_who_reaches_no_elector_says_so() -> None:
    with _swarms(2) as (one, other), patch.object(agreement, "GIVEN_UP", 0.5):
        one.stand(0, {}, {other.id: True})
        other.close(goodbye=False)
        one.send(1, b"share", 0.0)
        with pytest.raises(tw.errors.StateError, match="restart the store"):
            one.outcome(1)


def _nobody_can_be_reached() -> list[str]:
    """One worker takes a step alone, and cannot be reached by another one that wants to join."""
    with _store() as store, patch.multiple(agreement, LOST=1.0, FOUNDING=0.0):
        first, late = (Swarm(store, "", lambda tick: tick + 1, workers=1, quorum=1.0, grace=1.0) for _ in range(2))
        assert first.found()
        first.stand(0, {}, {first.id: True})
        first.send(1, b"share", 0.0)
        assert first.outcome(1) is not None
        assert first.begins()
        first.close(goodbye=False)
        with patch.object(Swarm, "_somebody", lambda self: False):
            said = told(late.found)
        late.close(goodbye=True)
        return [said]


def test_who_reaches_nobody_begins_no_second_training(ranks: Ranks) -> None:
    assert all("none of its workers can be reached" in said for said in ranks.run(1, _nobody_can_be_reached)[0])


@contextmanager
def _seats(count: int) -> Iterator[tuple[Callable[[], None], Callable[[float], None], list[Seat]]]:
    """Seats of so many workers under one store. The first call starts the store anew, the second lets time pass."""
    KEPT[:] = [_lasting_store()]
    port, now = KEPT[0].port, [0.0]

    def restart() -> None:
        KEPT.clear()
        gc.collect()
        KEPT.append(MADE.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    def passes(seconds: float) -> None:
        now[0] += seconds

    with ExitStack() as stack:
        found = [stack.enter_context(closing(Directory(f"tcp://127.0.0.1:{port}"))) for _ in range(count)]
        stack.enter_context(patch.object(seat, "monotonic", lambda: now[0]))
        yield restart, passes, [Seat(each) for each in found]


def test_who_cannot_reach_a_living_founder_says_so_and_raises(caplog: pytest.LogCaptureFixture) -> None:
    with _seats(3) as (restart, passes, (one, other, late)):
        assert not one.take("one host:1", enough=False)
        assert one.take("one host:1", enough=True)
        for _ in range(3 * int(agreement.LOST)):
            passes(1.0)  # it is busy, and does not even show that it lives
            assert not other.take("other host:2", enough=True, present={"one", "other"})
        for _ in range(2 * int(agreement.LOST)):
            passes(1.0)
            one.hold()
            assert not other.take("other host:2", enough=True)
        passes(1.0)
        one.hold()
        with pytest.raises(tw.errors.StateError, match="worker one at host:1 "):
            other.take("other host:2", enough=True)
        assert caplog.text.count("worker one at host:1 ") == 1
        one.hold(begins=True)
        one.leave()  # for good, and yet nobody else may
        for _ in range(int(agreement.LOST) + 1):
            assert not late.take("late host:3", enough=True)
            passes(1.0)
        with pytest.raises(tw.errors.StateError, match="restart the store"):
            late.take("late host:3", enough=True)
        restart()
        assert late.take("late host:3", enough=True)


def test_a_seat_is_free_once_its_founder_leaves_or_does_nothing_while_another_looks() -> None:
    with _seats(2) as (_, passes, (one, other)):
        assert one.take("one host:1", enough=True)
        one.leave()
        assert other.take("other host:2", enough=True)
        looks = 0
        while not one.take("one host:1", enough=True):
            passes(1000.0)  # as if this one were stopped, and the other one not
            looks += 1
        assert looks > agreement.LOST
        other.hold(begins=True)
        assert other.lost
        assert not other.begun
        other.join("one host:1")
        other.hold()
        assert not other.lost
        assert not one.lost


def test_one_sign_that_a_training_lives_is_enough() -> None:
    with _seats(2) as (_, _, (one, other)):
        assert one.take("one host:1", enough=True)
        other.join("one host:1")
        replace = other._directory.replace

        def beaten(*words: str) -> str:
            one.hold()
            return replace(*words)

        with patch.object(other._directory, "replace", side_effect=beaten) as tries:
            other.hold()
        assert tries.call_count == 1
        assert not other.lost


def test_a_training_that_has_begun_keeps_its_seat_when_the_store_is_started_anew() -> None:
    with _seats(3) as (restart, _, (one, other, third)):
        assert one.take("one host:1", enough=True)
        one.hold(begins=True)
        restart()
        assert other.take("other host:2", enough=True)
        one.hold()
        other.hold(begins=True)
        assert (one.lost, other.lost) == (False, True)
        restart()
        assert third.take("third host:3", enough=True)
        third.hold(begins=True)
        one.hold()
        assert (one.lost, third.lost) == (False, False)


def test_who_takes_over_a_training_that_has_begun_leaves_one_that_began_under_a_new_store() -> None:
    """It would else take over that state again and again, as the store has the other training."""
    with _swarms(2) as (one, other), ThreadPoolExecutor() as pool:
        other._seat.join("other host:2")
        assert other.begins()  # as if one were out of reach
        one._seat.join("one host:1", begun=True)
        one.stand(1, {}, {one.id: True})
        _wait(lambda: other.furthest == 1)
        fetched = pool.submit(other.fetch)
        _wait(lambda: bool(one.wanting))
        one.give(b"state")
        assert fetched.result(60.0) is not None
        assert other.begins()
        assert other._seat.training == one._seat.training


def _is_replaced() -> Log:
    """Rank 0 begins, and is stopped before its first outer step; rank 1 reaches nobody, and begins, too."""
    with _store() as store, patch.object(agreement, "FOUNDING", 0.0):
        stopped = patch.object(Seat, "hold")
        if dist.get_rank() == 0:
            with stopped:
                worker = Worker(store, _sparse()).train(H - 1)
                dist.barrier()
                dist.barrier()
        else:
            dist.barrier()
            alone = patch.object(Agreement, "present", property(lambda self: {self.own}))
            with alone, patch.object(Swarm, "_somebody", lambda self: False), patch.object(agreement, "LOST", 1.0):
                worker = Worker(store, _sparse())
            dist.barrier()
            worker.train_while_another_does({worker.handle.name})
        while len(worker.log) < 4:
            worker.train()
        assert not worker.handle.left_out  # nothing learnt is not the same as not finite
        worker.handle.remove()
        return worker.log


def test_a_founder_that_was_replaced_meanwhile_takes_over_the_other_ones_state(ranks: Ranks) -> None:
    assert _agree(ranks.run(2, _is_replaced))


def _goes_early() -> Log:
    """Rank 0 begins, and is gone before its state has arrived; it comes back as another worker."""
    fetch, take, fetched = Swarm.fetch, Seat.take, list[object]()

    def noted(swarm: Swarm) -> Any:
        fetched.append(fetch(swarm))
        return fetched[-1]

    with _store() as store, patch.object(agreement, "LOST", 1.0), ExitStack() as stack:
        if dist.get_rank() == 0:
            with patch.object(Swarm, "give"):
                Worker(store, _sparse(), workers=2).handle.remove(goodbye=False)
        else:
            stack.enter_context(patch.object(Swarm, "fetch", noted))
            stack.enter_context(patch.object(Seat, "take", lambda *a, **kw: bool(fetched) and take(*a, **kw)))
        worker = Worker(store, _sparse(), workers=2)
        assert fetched[:1] == [None] * dist.get_rank()
        while len(worker.log) < 4 or len(worker.handle.workers) < 2:
            worker.train()
        dist.barrier()
        worker.handle.remove()
        return worker.log


def test_a_founder_that_goes_before_anybody_has_its_state_is_replaced(ranks: Ranks) -> None:
    assert _agree(ranks.run(2, _goes_early))


def _loads_late() -> str:
    with _store() as store, patch.object(agreement, "FOUNDING", 0.0):
        worker = Worker(store, _sparse())
        worker.model.load_state_dict({name: x + 1 for name, x in worker.model.state_dict().items()})
        said = told(worker.train)
        worker.handle.remove()
        return said


def test_who_begins_may_load_no_model_after_outer_either(ranks: Ranks) -> None:
    assert "changed after they had joined" in ranks.run(1, _loads_late)[0]


def _other_settings() -> str:
    with _store() as store:
        try:
            steps = tw.outer_steps.sparseloco(every=H + dist.get_rank())
            Worker(store, steps, workers=2).handle.remove()
        except tw.errors.FingerprintError as error:
            return str(error)
        return ""


def test_another_recipe_is_refused(ranks: Ranks) -> None:
    assert any("another model, recipe or settings" in said for said in ranks.run(2, _other_settings))


def _joins_with_other_settings() -> str:
    with _store() as store:
        if dist.get_rank() == 0:
            worker = Worker(store, tw.outer_steps.sparseloco(every=H)).train(H)
        dist.barrier()
        if dist.get_rank() == 0:
            dist.barrier()  # by then the other one has failed
            return str(len(worker.train(2 * H).log))
        with pytest.raises(tw.errors.FingerprintError) as refused:
            Worker(store, tw.outer_steps.sparseloco(every=H + 1))
        dist.barrier()
        return str(refused.value)


@pytest.mark.slow
def test_who_joins_with_other_settings_fails_alone(ranks: Ranks) -> None:
    steps, said = ranks.run(2, _joins_with_other_settings)
    assert steps == "3"
    assert all(f"'every': {every}" in said for every in (H, H + 1))


def _refused() -> list[str]:
    model, nobody = nn.Linear(4, 4), "tcp://127.0.0.1:1"
    optimizer, group = torch.optim.SGD(model.parameters(), lr=0.1), dist.group.WORLD
    rounds = tw.OuterSteps(every=2, recipe=tw.recipes.powersgd(rank=1))
    crowded = tw.outer_steps.streaming_diloco(every=4, fragments=2, delay=3)
    asked: list[tuple[tw.OuterSteps, dict[str, Any]]]
    asked = [(_sparse(), {"group": group}), (rounds, {}), (crowded, {})]
    found = [told(partial(tw.outer, model, optimizer, steps, store=nobody, **options)) for steps, options in asked]
    alone: list[dict[str, Any]] = [{"certificate": "run.pem"}, {"workers": 4, "quorum": 0.5}]
    found += [told(partial(tw.outer, model, optimizer, _sparse(), **options)) for options in alone]
    return [*found, told(partial(tw.outer, model, optimizer, _sparse(), store=nobody, certificate="/nowhere/run.pem"))]


def test_what_does_not_go_with_a_store_is_refused(ranks: Ranks) -> None:
    words = ["leave one of them out", "takes several rounds", "fewer fragments", "use a VPN"]
    words += ["workers=4, quorum=0.5 given without store=", "'/nowhere/run.pem', and no file is there"]
    for said, word in zip(*ranks.run(1, _refused), words, strict=True):
        assert said.startswith("FileNotFoundError" if "no file" in word else "ValueError")
        assert word in said


def _refused_alone() -> str:
    model = nn.Linear(4, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"store": "tcp://127.0.0.1:1", "workers": 0}
    return told(partial(tw.outer, model, optimizer, _sparse(), **options)) if dist.get_rank() else "nothing"


def test_a_worker_with_a_store_asks_nobody_before_it_refuses(ranks: Ranks) -> None:
    assert ranks.run(2, _refused_alone) == ["nothing", "ValueError: workers is 0; expected an integer of at least 1"]


LATER: list[tuple[Any, str]] = [
    (outer, "_check_gathers"),
    (outer, "start_alike"),
    (Fragment, "__init__"),
    (outer, "RunningStatistics"),
    (Directory, "register"),
    (swarm, "dial"),
    (Swarm, "found"),
    (Swarm, "stand"),
    (Swarm, "settling"),
    (Member, "watch"),
]


def _open_now() -> set[Any]:
    """Sockets, and threads of ours, that are not garbage."""
    gc.collect()
    paths = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    threads = {each for each in threading.enumerate() if "thinwire" in each.name}
    return threads | {path.name for path in paths if path.name.startswith("socket:")}


@pytest.mark.parametrize(("owner", "name"), LATER, ids=lambda each: getattr(each, "__name__", each).rpartition(".")[2])
@pytest.mark.first(2)
def test_opening_that_fails_leaves_nothing(owner: Any, name: str) -> None:
    """Nor does a handle that is removed, but for its process group."""
    kept = MADE.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, address = nn.Linear(9, 8), f"tcp://127.0.0.1:{kept.port}"
    optimizer, recipe, before = torch.optim.SGD(model.parameters(), lr=0.1), _sparse(), _open_now()
    with closing(Directory(address)) as other:
        other.register({"id": "gone", "address": ["127.0.0.1", 1]})
    opens = partial(tw.outer, model, optimizer, recipe, store=address)
    with patch.multiple(agreement, FOUNDING=0.0, LOST=0.0):
        with patch.object(owner, name, side_effect=ArithmeticError), pytest.raises(ArithmeticError):
            opens()
        assert not dist.is_initialized()
        _wait(lambda: not _open_now() - before)
        opens().remove()
    dist.destroy_process_group()
    _wait(lambda: not _open_now() - before)


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1:29400", "tcp://10.0.0.1", "tcp://:1", "env://", MADE.HashStore()),
        *("tcp://10.0.0.1:99999", "tcp://[::1]:29400", "tcp://::1:29400"),
        *("tcp://one:²", "tcp:// :1", "tcp://me@one:1", "tcp://one/x:1"),
    ],
)
def test_what_is_no_address(address: object) -> None:
    with patch.dict("os.environ", {"MASTER_ADDR": "one", "MASTER_PORT": ""}):
        said = told(Directory, address)
    assert said.startswith(f"ValueError: store is {address!r}{', MASTER_ADDR' if address == 'env://' else ';'}")
    assert "tcp://10.0.0.1:29400, by a name or IPv4 address and a port below 65536" in said


def test_the_worker_with_the_store_is_reached_where_the_store_is() -> None:
    """If it has the store as all of its own addresses, it listens at all; others have the one that they know."""
    store = MADE.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    options: dict[str, Any] = {"workers": 1, "quorum": 1.0, "grace": 0.1}
    with patch.object(swarm, "dial", wraps=links.dial) as dialled:
        first = Swarm(store, "", lambda tick: tick + 1, **options)
        other = Swarm(f"tcp://127.0.0.2:{store.port}", "", lambda tick: tick + 1, **options)
        _wait(lambda: len(first.workers) == len(other.workers) == 2)
        assert [call.args[1] for call in dialled.call_args_list] == [("127.0.0.2", first._card["address"][1])]
    for each in (first, other):
        each.close(goodbye=True)


def test_whose_shares_never_count_is_told_once_why(caplog: pytest.LogCaptureFixture) -> None:
    with _swarms(2, grace=2.0) as swarms:
        one, far = _began(swarms, [True, True])
        (link,) = far._links.values()
        for tick, took, counts in [
            (1, 3.0, False),
            (2, 1.0, False),
            (3, 3.0, True),
            *((x, 3.0, False) for x in (4, 5, 6)),
        ]:
            with far._changed:
                far.known.decisions[tick] = Decision(tick, (one.id, far.id) if counts else (one.id,), {})
                far.known.times[tick] = awake.monotonic() - took
                for _ in range(2):  # more workers have it
                    far._take_got(link, {"tick": tick}, b"")
            assert caplog.text.count("this worker's shares arrive too late") == (tick > 4)
    assert "in 2 outer steps: the last took 3.0 s, and the others wait for grace=2." in caplog.text


def test_a_store_is_given_by_its_address_by_itself_or_by_the_launcher() -> None:
    store = MADE.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}", "TORCHELASTIC_RUN_ID": "run"}
    with patch.dict("os.environ", launcher):
        forms = f"tcp://127.0.0.1:{store.port}", store, MADE.PrefixStore("a", MADE.PrefixStore("b", store)), "env://"
        assert [found_address(each) for each in forms] == [
            ("127.0.0.1", store.port, prefix) for prefix in ["", "", "b/a/", "run."]
        ]
        with closing(Directory("env://", "of it")) as one:
            one.register({"id": "one"})
            assert one.decide("key", "value", most=lambda: True) == store.get("run.of it/key").decode() == "value"


def test_a_link_that_a_newer_one_replaces_does_not_look_like_an_end() -> None:
    """Both sides may dial at once. Who has not heard of the newer link yet must not take the other one for gone."""
    ends, send, once, lost = list[bool](), Link.send, iter([True]), Swarm.lost

    def does_not_answer(link: Link, words: Words, body: bytes = b"") -> None:
        if not words.get("answer"):
            send(link, words, body)

    def notes(swarm: Swarm, link: Link, *, silent: bool) -> None:
        if swarm._links.get(link.peer) is link:
            ends.append(silent)
        lost(swarm, link, silent=silent)

    with _swarms(2) as (one, other):
        with patch.object(Link, "send", does_not_answer), patch.object(Swarm, "lost", notes):
            address: Any = other._card["address"]
            links.dial(one, address, one._hello, lambda: next(once, None))
            _wait(lambda: bool(ends))
        assert all(ends)


@contextmanager
def _cut_off(one: Swarm) -> Iterator[None]:
    """Within, nobody else reaches a worker that still reaches the store."""
    lost = Swarm.lost

    def falls_silent(swarm: Swarm, link: Link, *, silent: bool) -> None:
        lost(swarm, link, silent=True)

    cut = patch.multiple(one, take=Mock(side_effect=OSError), _hello=Mock(side_effect=OSError))
    with patch.object(Swarm, "lost", falls_silent), cut:  # in this order: a frame may come in between
        for link in list(one._links.values()):
            link.close()
        _wait(lambda: not one._links)
        yield


def test_what_only_its_maker_knows_does_not_count_beside_a_restarted_store() -> None:
    """It has the answer of a store that then is killed, and the others meet without it under a new one."""
    with _swarms(3, lost=1000.0, quorum=0.3, grace=0.0) as swarms, ExitStack() as stack:
        one, *others = _began(swarms, [True, True, True])
        decide, port = one._directory.decide, KEPT[0].port

        def decides(*what: Any, **how: Any) -> Any:
            found = decide(*what, **how)
            if not KEPT[1:]:
                stack.enter_context(_cut_off(one))
                KEPT[:] = [None]
                gc.collect()
                KEPT[:] = [MADE.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False), True]
            return found

        with patch.object(one._directory, "decide", decides):
            one.send(1, b"share", 0.0)
            _wait(lambda: len(KEPT) > 1)
            for each in others:
                each.send(1, b"share", 0.0)
            outcomes = [each.outcome(1) for each in others]
            stack.close()
            found = one.outcome(1)
        assert len({each[0].shares for each in (found, *outcomes) if each}) == 1


def test_what_was_noted_is_proposed_again_in_a_later_life_of_the_store() -> None:
    """And nothing of an earlier one is noted any more."""
    known = Agreement("one", lambda tick: tick + 1, 0.5, 0.0)
    known.begin(0, dict.fromkeys(("one", "other", "third"), True))
    before, after = (Decision(1, (each,), known.view) for each in ("third", "one"))
    known.status = {"other": Standing(0, 0.0, 0, "2", Note("1", before)), "third": Standing(0, 0.0)}
    assert known.hear()
    assert (known.life, known.note.life) == ("2", "")
    assert known.is_majority()
    assert known.proposal() == before
    assert [known.binds(each) for each in (before, after)] == [True, False]
    assert known.hear(Note("2", before))
    assert known.proposal() is None
    assert known.count() is None
    known.status["other"] = Standing(0, 0.0, 0, "2", known.note)
    assert not known.hear(Note("1", after))
    assert known.count() == known.decisions[1] == before
    assert not known.note.life
