"""Ranks on unlike processors keep the same replicas, bit for bit; as a script, one such rank.

A library's factorisation, product or transform has other bits where vectors are wider, and so does a sum in an order of
its own. Gradients may differ by rank; what is decoded may not.
"""

import hashlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES, vector
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import kernels
from thinwire.kernels import Chunking
from thinwire.payloads import Chunks, Dense, Sketch, SketchTable

OTHER = {
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
PLAIN = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""}  # without fused operations
STEPS = 4


def _digest(tensors: list[Tensor]) -> str:
    joined = hashlib.sha256()
    for tensor in tensors:
        joined.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return joined.hexdigest()


def _matrix(rows: int, columns: int) -> Tensor:
    return vector(rows * columns, seed=rows).view(rows, columns)


def _library() -> str:
    """Return a digest of what libraries make of the same input: what each rank may not decode with."""
    pairs = torch.view_as_complex(_matrix(3 * 129, 2).view(3, 129, 2))
    tall = _matrix(300, 4)
    return _digest([torch.linalg.qr(tall).Q, tall @ _matrix(70, 4).T, torch.fft.irfft(pairs, n=256, norm="ortho")])


def _own() -> str:
    """Return a digest of what the kernels that decode make of the same input."""
    out, rows = torch.empty(300, 70), _matrix(9, 1003)
    kernels.outer_sums.cpu(out, kernels.orthonormal.cpu(_matrix(300, 4)), _matrix(70, 4))
    transformed = [
        kernels.inverse_fourier.cpu(_matrix(5 * 129, 2), 1200, 256),
        kernels.inverse_fourier.cpu(_matrix(31, 2), 60, 60),
    ]
    table = Sketch(values=vector(300), tables=(SketchTable(3, 100, 7),), numel=500)
    cut = Chunking.of((40, 48), 16, "dct", lambda size: 20)
    positions = torch.arange(20, dtype=torch.int16).mul(11).repeat(cut.chunks)
    chunks = Chunks(positions=positions, values=vector(cut.count), numel=cut.numel, chunkings=(cut,))
    left = vector(cut.numel)
    chunks.subtract_from([left])
    payloads = [Dense(values=row) for row in rows]
    return _digest([out, *transformed, Dense.concat(payloads).dense(), table.dense(), chunks.dense(), left])


def _trained(name: str) -> str:
    """Return a digest of the replica after some steps."""
    case = RECIPES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 90), nn.Tanh(), nn.Linear(90, 8))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if case.momentum else 0.0)
    thinwire.attach(replica, case.make(), optimizer=optimizer if case.momentum else None)
    for step in range(STEPS):
        optimizer.zero_grad()
        replica(_matrix(16, 40) + dist.get_rank() + step).square().mean().backward()
        optimizer.step()
    return _digest(list(model.parameters()))


def _rank(store: str, rank: int, world_size: int) -> dict[str, Any]:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    files = dist.FileStore(store, world_size)  # type: ignore[attr-defined]  # torch's stubs do not export it
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    found = {name: _trained(name) for name in RECIPES}
    dist.destroy_process_group()
    return {"capability": torch.backends.cpu.get_cpu_capability(), "library": _library(), "replicas": found}


def _run(arguments: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    known = (
        os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        | environment
    )
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _results(processes: "list[subprocess.Popen[str]]") -> list[dict[str, Any]]:
    try:
        outputs = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.slow
def test_replicas_are_alike_on_unlike_processors(tmp_path: Path) -> None:
    """Skips, if nothing fails, where this processor cannot pass for another: where libraries give the same bits."""
    store, environments = str(tmp_path / "store"), [{}, OTHER]
    found = _results([_run([store, str(rank), "2"], each) for rank, each in enumerate(environments)])
    first, second = (result["replicas"] for result in found)
    assert [name for name in RECIPES if first[name] != second[name]] == []
    if found[0]["library"] == found[1]["library"]:
        pytest.skip("libraries give the same bits as " + " and ".join(result["capability"] for result in found))


@pytest.mark.slow
def test_kernels_that_decode_fuse_nothing() -> None:
    """A processor without fused operations must give the bits of one that has them."""
    (elsewhere,) = _results([_run(["kernels"], PLAIN)])
    assert elsewhere["own"] == _own()


if __name__ == "__main__":
    if sys.argv[1] == "kernels":
        print(json.dumps({"own": _own()}))
    else:
        print(json.dumps(_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
