"""The example, as it stands, and what becomes of it when a worker is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from ranks import Ranks
from workers import example

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


def _minimal() -> list[str]:
    """Run the example on this rank, which has a group already."""
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        return example("minimal.py", "30")


def test_it_trains_to_identical_replicas(ranks: Ranks) -> None:
    for rank, lines in enumerate(ranks.run(2, _minimal)):
        assert lines[-1] == f"rank {rank}: replicas identical: True"


@pytest.mark.slow
def test_a_killed_worker_ends_the_other_with_an_error() -> None:
    survivor, victim = _ranks(10**9, port=_free_port())
    with survivor, victim:
        assert survivor.stdout is not None
        while "step 40" not in survivor.stdout.readline():
            pass
        os.kill(victim.pid, signal.SIGKILL)
        _, errors = survivor.communicate(timeout=500)
    assert survivor.returncode not in (0, -signal.SIGKILL)
    assert re.search(r"RuntimeError.*(closed by peer|reset by peer|[Tt]imed out)", errors), errors


def _torchrun(script: str, processes: int, *args: str) -> "subprocess.CompletedProcess[str]":
    """Run an example to its end under torchrun."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={_free_port()}"]
    return subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLE.with_name(script)), *args],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_stages_and_replicas_train_together() -> None:
    done = _torchrun("pipeline.py", 4, "41")
    losses = [float(found) for found in re.findall(r"rank 1: step \d+, loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 2, done.stderr
    assert done.stdout.count("replicas identical: True") == 4
    assert done.stdout.count("5.1% of the activations crossed") == 2


@pytest.mark.slow
def test_a_server_and_its_trainers_find_each_other_under_torchrun() -> None:
    done = _torchrun("parameter_server.py", 3, "60")
    assert "120 updates" in done.stdout, done.stderr
    assert len(re.findall(r"rank [12]: loss", done.stdout)) == 2


@pytest.mark.slow
def test_pipelines_train_on_a_server_for_each_stage() -> None:
    done = _torchrun("pipelines_on_servers.py", 6, "61")
    losses = [float(found) for found in re.findall(r"trainer 0: step \d+, loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 2, done.stderr
    assert done.stdout.count("122 updates") == 2
    assert done.stdout.count("5.1% of the activations crossed") == 2


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["", "--fsdp"])
def test_islands_exchange_what_they_moved(tmp_path: Path, inside: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}. " for n in range(4000)))
    done = _torchrun("islands.py", 4, str(text), "100", *inside.split())
    losses = [float(found) for found in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert losses[1] < losses[0], done.stderr
    assert "global parameters identical on both islands" in done.stdout
