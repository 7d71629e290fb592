"""Clusters of real processes; the functions on top run in the workers."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire_lab.cluster.link import Meter, Rate, interface_bytes
from thinwire_lab.cluster.local import Cluster, SupervisorDied, WorkerDied
from thinwire_lab.inputs import BadInput

Emit = Callable[[dict[str, Any]], None]

RATE = Rate(100_000_000)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces need Linux")


def work(job: dict[str, Any], emit: Emit) -> None:
    TASKS[job["task"]](job, emit)


def _answer(job: dict[str, Any], emit: Emit) -> None:
    for number in range(job["events"]):
        emit({"number": number, "text": job["text"]})


def _introduce(job: dict[str, Any], emit: Emit) -> None:
    names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"
    counted = interface_bytes()
    processes = {"process": os.getpid(), "parent": os.getppid(), "session": os.getsid(0)}
    emit(processes | {"counted": counted} | {name: os.environ[name] for name in names})


@functools.cache
def _join() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def _add_up(job: dict[str, Any], emit: Emit) -> None:
    import torch
    import torch.distributed as dist

    _join()
    numbers = torch.full((job["numbers"],), float(dist.get_rank() + 1))
    dist.barrier()
    before = interface_bytes()
    dist.all_reduce(numbers)
    dist.barrier()  # what a rank still has in its socket when it has its own sum leaves before the others arrive here
    after = interface_bytes()
    sent = None if before is None or after is None else [b - a for a, b in zip(before, after, strict=True)]
    emit({"sums": sorted(set(numbers.tolist())), "sent": sent})


def _add_up_in_groups(job: dict[str, Any], emit: Emit) -> None:
    """Return the bytes that leave this worker's island while neighbours add up, and while others do."""
    import torch
    import torch.distributed as dist

    _join()
    rank = dist.get_rank()
    within, between = ([dist.new_group(ranks) for ranks in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    sent = []
    meter = Meter()
    for group in (within[rank // 2], between[rank % 2]):
        meter.skip()
        dist.barrier()
        dist.all_reduce(torch.ones(job["numbers"]), group=group)
        dist.barrier()
        sent.append(meter.drain().get("measured"))
        dist.barrier()  # a neighbour's next numbers must not count in these
    emit({"sent": sent})


def _read_shapers(job: dict[str, Any], emit: Emit) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        shapers = netlink.get_qdiscs(index=netlink.link_lookup(ifname="eth0")[0])
    emit({"kinds": [shaper.get_attr("TCA_KIND") for shaper in shapers]})


def _read_limit(job: dict[str, Any], emit: Emit) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        (shaper,) = netlink.get_qdiscs(index=netlink.link_lookup(ifname="eth0")[0])
    emit({"bytes_per_second": shaper.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"]})


def _fail(job: dict[str, Any], emit: Emit) -> None:
    print("on the way")
    if os.environ["RANK"] == "1":
        raise ValueError("no such luck")
    time.sleep(600)


def _sleep(job: dict[str, Any], emit: Emit) -> None:
    subprocess.Popen(["sleep", "600"])
    _introduce(job, emit)
    time.sleep(600)


def _add_up_forever(job: dict[str, Any], emit: Emit) -> None:
    while True:
        _add_up({"numbers": 1000}, emit)


TASKS = {
    "answer": _answer,
    "introduce": _introduce,
    "add up": _add_up,
    "add up forever": _add_up_forever,
    "add up in groups": _add_up_in_groups,
    "read shapers": _read_shapers,
    "read limit": _read_limit,
    "fail": _fail,
    "sleep": _sleep,
}


def _events(cluster: Cluster, **job: Any) -> list[list[dict[str, Any]]]:
    """Return the events of each rank in order."""
    events: dict[int, list[dict[str, Any]]] = {}
    for rank, event in cluster.run(job):
        events.setdefault(rank, []).append(event)
    return [events[rank] for rank in sorted(events)]


def _members(session: int) -> set[int]:
    found = set()
    for process in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            if os.getsid(process) == session:
                found.add(process)
        except ProcessLookupError:
            continue
    return found


def _is_gone(session: int) -> bool:
    deadline = time.monotonic() + 10
    while _members(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _members(session)


def _traces() -> tuple[set[str], set[str]]:
    """Return the names of this namespace's interfaces, and of namespaces that have one."""
    named = Path("/run/netns")
    return {path.name for path in Path("/sys/class/net").iterdir()}, {path.name for path in named.glob("*")}


def _script(body: str, *launcher: str) -> subprocess.Popen[str]:
    """Start a process that opens a cluster, and does what `body` says with it."""
    script = f"""
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.link import Rate
with Cluster(2, Rate(100_000_000), "test_cluster:work") as cluster:
    {body}
"""
    command = [sys.executable, *launcher, "-c", script]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


UNPRIVILEGED = """
import ctypes, os, pathlib, sys
user, group = os.geteuid(), os.getegid()
if ctypes.CDLL(None).unshare(0x10000000):
    sys.exit("user namespaces are not permitted")
own = pathlib.Path("/proc/self")
(own / "setgroups").write_text("deny")
(own / "uid_map").write_text(f"1000 {user} 1")
(own / "gid_map").write_text(f"1000 {group} 1")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Becomes a user without any privilege who may do with files what this one may."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, RATE, "test_cluster:work") as cluster:
        yield cluster


@pytest.fixture
def linked(cluster: Cluster) -> Cluster:
    if not cluster.throttled:
        pytest.skip(cluster.label)
    return cluster


def test_jobs_reach_all_and_events_come_back_in_order(cluster: Cluster) -> None:
    for text in ("short", "long" * 100_000):
        answers = _events(cluster, task="answer", text=text, events=3)
        assert answers == 3 * [[{"number": n, "text": text} for n in range(3)]]


def test_workers_are_told_who_and_where_they_are(cluster: Cluster) -> None:
    workers = [event for (event,) in _events(cluster, task="introduce")]
    assert [worker["RANK"] for worker in workers] == ["0", "1", "2"]
    assert len({worker["process"] for worker in workers}) == 3
    assert len({(worker["MASTER_ADDR"], worker["MASTER_PORT"]) for worker in workers}) == 1
    for worker in workers:
        assert worker["WORLD_SIZE"] == "3"
        assert int(worker["OMP_NUM_THREADS"]) >= 1
        assert worker["session"] != os.getsid(0)  # ^C does not reach it


def test_a_job_at_a_time(cluster: Cluster) -> None:
    events = cluster.run({"task": "answer", "text": "", "events": 1})
    with pytest.raises(RuntimeError, match="not done"):
        cluster.run({"task": "answer", "text": "", "events": 1})
    assert len(list(events)) == 3


def test_a_closed_cluster_takes_no_jobs() -> None:
    with pytest.raises(RuntimeError, match="not open"):
        Cluster(2, None, "test_cluster:work").run({})


def test_islands_are_of_one_size() -> None:
    with pytest.raises(BadInput, match="5 workers cannot be divided into islands of 2"):
        Cluster(5, None, "test_cluster:work", island=2)


@pytest.mark.parametrize("world", [0, -1, 255])
def test_how_many_workers_there_can_be(world: int) -> None:
    with pytest.raises(BadInput, match="1 to 254"):
        Cluster(world, None, "test_cluster:work")


def test_links_carry_gloo_and_count_it(linked: Cluster) -> None:
    numbers = 100_000
    payload = 2 * 2 / 3 * 4 * numbers
    for on in (True, False):
        linked.throttle(on)
        for (event,) in _events(linked, task="add up", numbers=numbers):
            sent, packets = event["sent"]
            assert event["sums"] == [6.0]
            assert 1.03 * payload < sent < 1.2 * payload + 10_000
            assert packets > payload / 1448
    linked.throttle(True)


@pytest.mark.slow
def test_an_island_shares_a_link_which_carries_what_leaves_it_alone() -> None:
    with Cluster(4, RATE, "test_cluster:work", island=2) as islands:
        if not islands.throttled:
            pytest.skip(islands.label)
        assert islands.label == "100 Mbit/s per island, each way; unthrottled within"
        numbers = 100_000
        for (event,) in _events(islands, task="add up in groups", numbers=numbers):
            within, between = event["sent"]
            assert within < 10_000
            assert 1.03 < between / (2 * 4 * numbers) < 1.2  # of both who share the link
        for on in (False, True):
            islands.throttle(on)
            assert all("tbf" not in event["kinds"] for (event,) in _events(islands, task="read shapers"))


def test_links_are_limited_and_lifted(linked: Cluster) -> None:
    assert linked.label == "100 Mbit/s per worker, each way"
    for on, speed in ((False, 2**32 - 1), (True, 12_500_000)):
        linked.throttle(on)
        assert _events(linked, task="read limit") == 3 * [[{"bytes_per_second": speed}]]


@pytest.mark.slow
def test_a_latency_is_kept_and_printed_as_measured() -> None:
    with Cluster(2, Rate(100_000_000, 0.02), "test_cluster:work") as cluster:
        if not cluster.throttled:
            pytest.skip(cluster.label)
        said, _, measured = cluster.label.partition("; a ping takes ")
        assert said == "100 Mbit/s and 20 ms per worker, each way"
        assert float(measured.removesuffix(" ms")) >= 40
        for on in (True, False):
            cluster.throttle(on)
            for (event,) in _events(cluster, task="add up", numbers=100_000):
                assert event["sums"] == [3.0]
                assert 1.03 * 400_000 < event["sent"][0] < 1.2 * 400_000 + 10_000


@pytest.mark.slow
def test_a_link_without_limit_is_counted_too() -> None:
    with Cluster(2, None, "test_cluster:work") as cluster:
        assert not cluster.throttled
        assert cluster.label.startswith("unthrottled")
        cluster.throttle(False)
        counted = [event["counted"] for (event,) in _events(cluster, task="introduce")]
        session = os.getsid(_events(cluster, task="introduce")[0][0]["process"])
    assert _is_gone(session)
    if "(" in cluster.label:
        pytest.skip(cluster.label)
    assert all(len(traffic) == 2 for traffic in counted)


@pytest.mark.slow
def test_without_namespaces_workers_share_the_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyroute2.py").write_text("raise ImportError('hidden')")
    monkeypatch.syspath_prepend(tmp_path)
    with Cluster(2, RATE, "test_cluster:work") as cluster:
        assert not cluster.throttled
        assert cluster.label.startswith("unthrottled (no network namespaces: ")
        cluster.throttle(False)
        for (event,) in _events(cluster, task="add up", numbers=1000):
            assert event == {"sums": [3.0], "sent": None}


@pytest.mark.slow
def test_what_a_handler_raises_is_told() -> None:
    with Cluster(2, RATE, "test_cluster:work", namespaces=False) as cluster:
        assert cluster.label == "unthrottled (no network namespaces: not wanted)"
        session = _events(cluster, task="introduce")[0][0]["session"]
        with pytest.raises(WorkerDied, match=r"^worker 1 died: ValueError: no such luck$") as caught:
            _events(cluster, task="fail")
        assert _is_gone(session)
        with pytest.raises(RuntimeError, match="not open"):
            cluster.run({})
    assert caught.value.rank == 1
    assert caught.value.reason.startswith("Traceback")
    assert caught.value.stderr_tail == "on the way\n" + caught.value.reason


@pytest.mark.slow
def test_a_handler_that_does_not_exist_is_told() -> None:
    with Cluster(1, None, "test_cluster:missing") as cluster, pytest.raises(WorkerDied, match="missing"):
        _events(cluster)


@pytest.mark.slow
def test_who_is_killed_is_told_rather_than_who_misses_it() -> None:
    with Cluster(3, RATE, "test_cluster:work") as cluster:
        workers = [event for (event,) in _events(cluster, task="introduce")]
        events = cluster.run({"task": "add up forever"})
        heard = set[int]()
        while heard != {0, 1, 2}:  # a fast one may be heard twice first
            heard.add(next(events)[0])
        os.kill(workers[2]["process"], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"^worker 2 died: killed by SIGKILL$") as caught:
            list(events)
        assert caught.value.rank == 2
        assert _is_gone(workers[0]["session"])


@pytest.mark.slow
@LINUX
def test_workers_do_not_outlive_their_supervisor() -> None:
    with Cluster(2, RATE, "test_cluster:work") as cluster:
        events = cluster.run({"task": "sleep"})
        _, event = next(events)
        os.kill(event["parent"], signal.SIGKILL)
        with pytest.raises(SupervisorDied):
            list(events)
        assert _is_gone(event["session"])


@pytest.mark.slow
def test_interrupting_ends_what_is_asleep() -> None:
    sessions = []

    def interrupted() -> None:
        with Cluster(2, None, "test_cluster:work") as cluster:
            for _, event in cluster.run({"task": "sleep"}):
                sessions.append(event["session"])
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert _is_gone(sessions[0])


@LINUX
@pytest.mark.slow
def test_killing_the_parent_leaves_nothing() -> None:
    before = _traces()
    with _script("for _, event in cluster.run({'task': 'sleep'}): print(event['session'], flush=True)") as parent:
        assert parent.stdout is not None
        session = int(parent.stdout.readline())
        assert len(_members(session)) >= 4
        assert _traces() == before
        parent.kill()
    assert _is_gone(session)
    assert _traces() == before


@pytest.mark.slow
@LINUX
def test_links_need_no_privileges() -> None:
    lines = "print(cluster.label)", "print([event['counted'] for _, event in cluster.run({'task': 'introduce'})])"
    with _script("; ".join(lines), "-c", UNPRIVILEGED) as parent:
        printed, _ = parent.communicate()
    if "unthrottled" in printed or not printed:
        pytest.skip(printed or "user namespaces are not permitted here")
    label, counted = printed.splitlines()
    assert label == "100 Mbit/s per worker, each way"
    assert "None" not in counted
