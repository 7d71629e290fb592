"""The interpreter ends only when no thread of a collective will ask for it again."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import thinwire

# Two ranks; `late` runs after thinwire's own handlers, as handlers run in reverse order.
START = """
import atexit, os, signal, sys, time, weakref
after = []
@atexit.register
def late():
    if failed := [check.__name__ for check in after if not check()]:
        print(failed, file=sys.stderr, flush=True)
        os._exit(3)
import torch, torch.distributed as dist
from torch import nn
import thinwire as tw
from thinwire.collectives import exit as leaving
from thinwire.collectives import communication_thread
from thinwire.payloads import Dense
torch.set_num_threads(1)
path = sys.argv[1]
parent = os.getpid()
rank = 0 if os.fork() else 1
signal.alarm(100)  # neither outlives the test
store = dist.FileStore(path, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = dist.group.WORLD

class Slow:
    def __del__(self):
        time.sleep(0.3)

def slow():
    held = Slow()
    return lambda done: held and None

def together(start):
    # Rank 0 has its callback in place before rank 1 begins.
    if rank == 1:
        store.wait(["ready"])
        start().wait()
        os._exit(0)
    future = start().then(slow())
    store.set("ready", "")
    future.wait()
"""

COLLECTIVES = {
    "all_reduce": "together(lambda: tw.exchanges.AllReduce().start(Dense(values=torch.ones(3)), group))",
    "all_gather": "together(lambda: tw.exchanges.AllGather().start(Dense(values=torch.ones(3)), group))",
    "all_gather in pieces": (
        "together(lambda: tw.exchanges.AllGather().start(Dense(values=torch.ones(100_000)), group))"
    ),
    "communication thread": (
        "thread = communication_thread(group);"
        "together(lambda: thread.submit(lambda own: dist.barrier(own), torch.device('cpu')))"
    ),
}


def _end(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks and return how rank 0 ended."""
    source = str(Path(thinwire.__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, "-c", START + script, str(Path(folder) / "store")],
            env=os.environ | {"PYTHONPATH": source},
            capture_output=True,
            text=True,
        )


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=COLLECTIVES)
@pytest.mark.parametrize("destroy", ["", "dist.destroy_process_group()"], ids=["kept", "destroyed"])
def test_a_callback_that_is_let_go_of_late_does_not_abort_the_exit(collective: str, destroy: str) -> None:
    done = _end(f"{collective}\n{destroy}")
    assert done.returncode == 0, done.stderr


TRAIN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 300)
    def forward(self, x):
        return self.out(self.rows(x))

torch.manual_seed(0)
ddp = nn.parallel.DistributedDataParallel(Net())
tw.attach(ddp, tw.recipes.{recipe})
for _ in range(2):
    ddp(torch.arange(6)).square().mean().backward()
from thinwire.collectives import thread as threads
opened = [weakref.ref(one._group) for one in threads._open.values()]
def all_lent_is_back():
    return not leaving._lent
def thread_opened():
    return len(opened) == {threads}
def no_thread_has_a_group():
    return not any(group() for group in opened)
after += [all_lent_is_back, thread_opened, no_thread_has_a_group]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "destroy",
    ["", "dist.destroy_process_group()"],
    ids=["kept", "destroyed"],
)
@pytest.mark.parametrize(
    ("recipe", "threads"),
    [
        ("gtopk(minimum_size=1)", 1),
        ("topk(minimum_size=1)", 0),
        ("randomk(minimum_size=1)", 0),
        ("s2_reducer()", 1),
    ],
)
def test_nothing_is_lent_and_no_thread_has_a_group_when_the_interpreter_ends(
    recipe: str, threads: int, destroy: str
) -> None:
    done = _end(f"{TRAIN.format(recipe=recipe, threads=threads)}\n{destroy}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_peer_that_is_gone_does_not_hold_up_the_exit() -> None:
    done = _end("""
communication_thread(group)
if rank == 1:
    os.close(1), os.close(2)  # nobody waits for this one
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(0)
communication_thread(group).submit(lambda own: dist.barrier(own), torch.device("cpu"))
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    done = _end("""
communication_thread(group)
kept = leaving.lend(torch.ones(3))
child = os.fork()
if child:
    leaving._lent.clear()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
def expects_nothing():
    return not leaving._lent
after.append(expects_nothing)
""")
    assert done.returncode == 0, done.stderr
