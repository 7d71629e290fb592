"""The example, as it stands, and what becomes of it when a worker is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal.py"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _ranks(steps: int, port: int) -> "list[subprocess.Popen[str]]":
    """Start two ranks as torchrun would, but with nobody to end one when the other dies."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), str(steps)]
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(command, env=os.environ | group | {"RANK": str(rank)}, stdout=pipe, stderr=pipe, text=True)
        for rank in range(2)
    ]


def test_it_trains_to_identical_replicas() -> None:
    for rank, process in enumerate(_ranks(30, port=_free_port())):
        output, errors = process.communicate(timeout=120)
        assert f"rank {rank}: replicas identical: True" in output, errors
        # On a busy machine any DDP script on Gloo may abort after its last line.
        assert process.returncode == 0 or "terminate called without an active exception" in errors


@pytest.mark.slow
def test_a_killed_worker_ends_the_other_with_an_error() -> None:
    survivor, victim = _ranks(10**9, port=_free_port())
    with survivor, victim:
        assert survivor.stdout is not None
        while "step 40" not in survivor.stdout.readline():
            pass
        os.kill(victim.pid, signal.SIGKILL)
        _, errors = survivor.communicate(timeout=60)
    assert survivor.returncode not in (0, -signal.SIGKILL)
    assert re.search(r"RuntimeError.*(closed by peer|reset by peer|[Tt]imed out)", errors), errors


@pytest.mark.slow
def test_stages_and_replicas_train_together() -> None:
    """Four ranks under torchrun, as README has it."""
    script = EXAMPLE.with_name("pipeline.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--master-port",
        str(_free_port()),
    ]
    done = subprocess.run(
        [*command, str(script), "41"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    losses = [float(found) for found in re.findall(r"rank 1: step \d+, loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 2, done.stderr
    assert done.stdout.count("replicas identical: True") == 4
    assert done.stdout.count("5.1% of the activations crossed") == 2


@pytest.mark.slow
def test_a_server_and_its_trainers_find_each_other_under_torchrun() -> None:
    script, port = EXAMPLE.with_name("parameter_server.py"), str(_free_port())
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=3",
            f"--master-port={port}",
            str(script),
            "60",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "120 updates" in done.stdout, done.stderr
    assert len(re.findall(r"rank [12]: loss", done.stdout)) == 2


@pytest.mark.slow
def test_pipelines_train_on_a_server_for_each_stage() -> None:
    script, port = EXAMPLE.with_name("pipelines_on_servers.py"), str(_free_port())
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=6",
            f"--master-port={port}",
            str(script),
            "61",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    losses = [float(found) for found in re.findall(r"trainer 0: step \d+, loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 2, done.stderr
    assert done.stdout.count("122 updates") == 2
    assert done.stdout.count("5.1% of the activations crossed") == 2
