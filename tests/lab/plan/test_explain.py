"""`thinwire plan --explain`: what of a step is the network, and the one change that helps most."""

import json
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from plans import cost, linear, profile
from typer.testing import CliRunner

from thinwire.exchanges import Link
from thinwire.planner import Budget, Curve, Plan, decide
from thinwire_lab.cli import app
from thinwire_lab.inputs import BadInput
from thinwire_lab.plan.explain import Sent, explained, sent
from thinwire_lab.plan.worker import Script, complaints

N, RANKS = 1_000_000, 4
LINK = Link(latency=0.01, bandwidth=1e7)
BUDGET = Budget(names=("topk",), densities=(0.01,))
NATIVE = 2 * 3 * 0.01 + 3 / 4 * 4 * N / 1e7 + 3 * 0.01 + 3 / 4 * 4 * N / 1e7
"""Seconds of what `SHARDED` gathers and reduces."""
SHARDED = Script(
    seconds=0.1 + NATIVE, shards=4, modules=1, gathers=2, gathered=4.0 * N, reductions=1, reduced=4.0 * N, held=1000
)


def _plan(script: Script | None = None, *, coder: float = 1e-9, link: Link = LINK, **made: Any) -> Plan:
    """A plan for a step that computes for 0.1 s. `coder`: seconds to code an element."""
    known = {"made": made if script is None else {**made, "script": asdict(script)}}
    each = linear(coder)
    slow = profile(
        {0.1: [("0", N)]},
        link=link,
        costs={
            "topk:0.01": cost(encode=linear(1e-9), decode=linear(1e-9), nbytes=linear(0.06)),
            "qsgd": cost(encode=each, decode=each, nbytes=linear(0.5)),
        },
        gathers={
            "lossless": cost(encode=each, decode=each, nbytes=linear(1.4)),
            "differences": cost(encode=each, decode=each, nbytes=linear(0.53)),
        },
        world_size=RANKS,
        **known,
    )
    return decide(slow, BUDGET)


def _ways(plan: Plan) -> Mapping[str, Sent]:
    return {way.name: way for way in sent(plan)}


def test_what_each_way_of_ddp_sends_and_how_long_it_takes() -> None:
    ways = _ways(plan := _plan())
    assert ways["DDP in float32"].nbytes == pytest.approx(2 * 3 / 4 * 4 * N)
    assert ways["DDP in float32"].exchange == pytest.approx(6 * (0.01 + N / 1e7))
    assert ways["thinwire.attach as planned"].nbytes == pytest.approx(3 * 0.06 * N)
    assert ways["thinwire.attach as planned"].exchange == pytest.approx(3 * (0.01 + 0.06 * N / 1e7))
    assert ways["thinwire.attach as planned"].coding == pytest.approx(2e-3)
    said = explained(plan).conclusion
    assert "DDP sends 6.00 MB of gradients from each rank" in said
    assert "What helps most: thinwire.attach(model, plan)" in said


def test_what_fsdp_gathers_is_seconds_and_what_codes_it_too() -> None:
    ways = _ways(_plan(SHARDED))
    native = ways["FSDP2 in bfloat16"]
    assert native[1:5] == pytest.approx((3 / 4 * 8 * N, NATIVE, 0, 0.1 + NATIVE))
    assert native.there
    differences = ways["thinwire.scatter, gathers=Differences(), qsgd"]
    assert differences.nbytes == pytest.approx(3 / 4 * (0.53 + 0.5) * N)
    assert differences.exchange == pytest.approx(3 * (2 + 1) * 0.01 + differences.nbytes / 1e7)
    assert differences.coding == pytest.approx(1e-9 * (2 * N / 4 + N + N / 4))
    assert differences.seconds == pytest.approx(0.1 + differences.exchange + differences.coding)
    lossless = ways["thinwire.scatter, gathers=Lossless(), qsgd"]
    assert lossless.nbytes == pytest.approx(3 / 4 * (2 * 1.4 + 0.5) * N)
    assert lossless.coding == pytest.approx(1e-9 * (2 * 2 * N / 4 + N + N / 4))


FULL = replace(SHARDED, held=1000, room=100)
ISLAND: dict[str, Any] = {"island": {"ranks": 2, "latency": 1e-5, "bandwidth": 1e10}}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (_plan(FULL), r"thinwire.scatter\(.*Differences\(\)\). A step should then take .* times as fast"),
        (_plan(FULL, coder=1e-6), "Nothing here would save more than 5 % of it"),
        (_plan(replace(FULL, seconds=0.1045), coder=0.0), "Nothing here would save more than 5 % of it"),
        (_plan(replace(FULL, room=800), **ISLAND), "HSDP: let fully_shard cut the model within each host of 2 ranks"),
        (_plan(replace(SHARDED, room=2000)), "train in DistributedDataParallel, as each rank can hold the whole model"),
        (_plan(replace(SHARDED, room=2000, seconds=64.6), link=Link(latency=0.5, bandwidth=1e5)), r"thinwire.outer\("),
        (
            _plan(replace(FULL, shards=2, replicas=2, crossing=False, between=LINK)),
            r"thinwire.shard\(model, thinwire.recipes.qsgd\(\), mesh=mesh\). A step",
        ),
        (_plan(replace(FULL, itemsize=4, gathered=1e9, reduced=1.0), coder=1e-6), r"MixedPrecisionPolicy\("),
    ],
)  # fmt: skip
def test_the_one_change_that_helps_most(plan: Plan, expected: str) -> None:
    assert re.search(expected, explained(plan).conclusion)


@pytest.mark.parametrize(
    ("script", "made", "expected"),
    [
        (SHARDED, {}, "the network is 87% of it. FSDP gathers parameters across the network, as 4 ranks hold"),
        (SHARDED, ISLAND, "FSDP gathers parameters across the slow link, as 4 ranks hold"),
        (replace(SHARDED, crossing=False), {}, "FSDP gathers parameters among 4 near ranks; only gradients cross"),
    ],
)
def test_the_share_of_a_step_and_whether_gathers_cross_are_said(
    script: Script, made: dict[str, Any], expected: str
) -> None:
    plan = _plan(script, settings=["NCCL_NET=Socket."], **made)
    assert expected in (said := explained(plan).conclusion)
    assert "NCCL_NET=Socket. What helps most" in said
    assert explained(plan).document["share"] == pytest.approx(NATIVE / (0.1 + NATIVE))


def test_what_is_neither_computing_nor_network_stays() -> None:
    """FSDP's own work, and cores that ranks share, are not the network's."""
    busy, usual = (_plan(replace(SHARDED, seconds=0.1 + NATIVE + more)) for more in (0.5, 0.0))
    for name, way in _ways(busy).items():
        if "scatter" in name or way.there:
            assert way.seconds == pytest.approx(_ways(usual)[name].seconds + 0.5)
    assert explained(busy).document["share"] == pytest.approx(NATIVE / (0.6 + NATIVE))


def test_frozen_parameters_do_not_travel_as_differences() -> None:
    lora = replace(SHARDED, gathered=400.0 * N)
    plain, frozen = _ways(_plan(SHARDED)), _ways(_plan(lora))
    assert frozen["FSDP2 in bfloat16"].nbytes == pytest.approx(3 / 4 * 404 * N)
    name = "thinwire.scatter, gathers=Differences(), qsgd"
    assert frozen[name].nbytes == plain[name].nbytes


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seconds": math.nan}, "made.script.seconds is nan; expected a finite number above 0"),
        ({"shards": 0}, "made.script.shards is 0; expected an integer of at least 1"),
        ({"gathered": 10**400}, "made.script.gathered is 1000"),
        ({"itemsize": None}, "made.script.itemsize is None; expected an integer of at least 1"),
        ({"gathers": 0.0}, "made.script.gathers is 0.0 and reductions 1; expected more than 0"),
        ({"near": {"latency": 0.0, "bandwidth": 0.0}}, "made.script.near.bandwidth is 0.0; expected more than 0"),
    ],
)
def test_a_damaged_script_is_refused(changed: dict[str, Any], said: str) -> None:
    plan = _plan()
    spoilt = replace(plan.profile, made={"script": asdict(SHARDED) | changed})
    with pytest.raises(BadInput, match=re.escape(said)):
        sent(replace(plan, profile=spoilt))


def test_what_cannot_be_explained_is_refused() -> None:
    plan = _plan(SHARDED)
    endless = replace(plan.profile.gathers["lossless"], encode=Curve(((1.0, 0.0), (2.0, 1e308))))
    gathers = {**plan.profile.gathers, "lossless": endless}
    with pytest.raises(ValueError, match=r"a step with thinwire.scatter, gathers=Lossless\(\), qsgd takes inf s"):
        sent(replace(plan, profile=replace(plan.profile, gathers=gathers)))
    with pytest.raises(BadInput, match="a step takes 0 s"):
        sent(replace(plan, dense_seconds=0.0))
    one = replace(plan.profile, gathers={"lossless": plan.profile.gathers["lossless"]})
    assert len(sent(replace(plan, profile=one))) < len(sent(plan))


def test_an_island_larger_than_the_shards_offers_nothing() -> None:
    island = {"ranks": 8, "latency": 0.0, "bandwidth": 1e9}
    assert not any("islands" in name for name in _ways(_plan(SHARDED, island=island)))


def test_a_single_worker_sends_nothing() -> None:
    with pytest.raises(BadInput, match="2 workers or more"):
        sent(decide(_plan().profile.on(world_size=1), BUDGET))


SCRIPT = """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def step(model):
        return model(torch.randn(8, 64)).square().mean()

    def whole():
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def sharded(shape, names):
        model, mesh = whole(), init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, step, torch.optim.AdamW(model.parameters())

    def fsdp():
        return sharded((2,), None)

    def hsdp():
        return sharded((1, 2), ("replicate", "shard"))

    def partly():
        model = whole()
        fully_shard(model[2], mesh=init_device_mesh("cpu", (2,)))
        return model, step

    def older():
        init_device_mesh("cpu", (2,))
        return FullyShardedDataParallel(whole(), device_id=torch.device("cpu")), step

    def ddp():
        init_device_mesh("cpu", (2,))
        model = DistributedDataParallel(whole())
        return model, step, torch.optim.AdamW(model.parameters())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("build", "gathered"), [("fsdp", True), ("hsdp", True), ("ddp", False)])
def test_scripts_are_explained_as_their_users_write_them(tmp_path: Path, build: str, gathered: bool) -> None:
    file, found = tmp_path / "train.py", tmp_path / "plan.json"
    file.write_text(textwrap.dedent(SCRIPT))
    command = ["plan", f"{file}:{build}", "--workers", "2", "--link", "none", "--explain", "--json", str(found)]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert done.exit_code == 0, (done.output, done.exception)
    assert "the network is" in done.stdout
    document = json.loads(found.read_text())
    script, explained = document["profile"]["made"]["script"], document["explained"]
    assert 0 <= explained["share"] < 1
    assert (script["modules"], script["shards"]) == ((2, 2) if gathered else (0, 1))
    if gathered:
        parameters = 4 * (64 * 128 + 128 + 2 * 128 + 2)  # padded to two rows
        assert script["reduced"] == parameters
        assert script["gathered"] == parameters + 4 * (64 * 128 + 128)  # the root is gathered once
        assert {"lossless", "differences"} == document["profile"]["gathers"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "more", "code", "says"),
    [
        ("fsdp", [], 2, "add --explain"),
        ("partly", ["--explain"], 0, "FSDP gathers parameters across the network"),
        ("older", ["--explain"], 2, "FullyShardedDataParallel"),
    ],
)
def test_other_scripts_are_explained_or_told_why_not(
    tmp_path: Path, build: str, more: list[str], code: int, says: str
) -> None:
    (file := tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = CliRunner().invoke(app, ["plan", f"{file}:{build}", "--workers", "2", "--link", "none", *more])
    assert done.exit_code == code
    assert says in re.sub(r"\s+", " ", done.output)


def test_settings_that_slow_a_network_down_are_named(tmp_path: Path) -> None:
    for card, speed in {"eth0": "1000", "eth1": "25000"}.items():
        (tmp_path / "net" / card / "device").mkdir(parents=True)
        (tmp_path / "net" / card / "speed").write_text(f"{speed}\n")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    said = {
        name: complaints({name: value}, tmp_path)
        for name, value in {
            "NCCL_SOCKET_IFNAME": "docker0",
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_IB_DISABLE": "1",
            "NCCL_NET": "Socket",
            "NCCL_P2P_DISABLE": "1",
        }.items()
    }
    assert "names no network card" in said["NCCL_SOCKET_IFNAME"][0]
    assert said["GLOO_SOCKET_IFNAME"][0].endswith("set GLOO_SOCKET_IFNAME=eth1.")
    assert "off this host's InfiniBand (mlx5_0)" in said["NCCL_IB_DISABLE"][0]
    assert all(len(lines) == 1 for lines in said.values())
    assert complaints({"GLOO_SOCKET_IFNAME": "eth1", "NCCL_IB_DISABLE": "0"}, tmp_path) == []
