"""What is here: versions, devices, and which implementation of the kernels runs."""

import os
import platform
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType

import torch
import torch.distributed as dist

from thinwire import kernels
from thinwire.kernels import Kernel
from thinwire.version import __version__
from thinwire_lab.check.kernels import implementation
from thinwire_lab.machine import processor, version_of
from thinwire_lab.show.table import human_bytes

_BACKENDS = ("gloo", "nccl", "mpi")
_PACKAGES = ("torch", "numba", "triton", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of what computes; "absent" for a package that is not installed."""
    return {
        "thinwire": __version__,
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def _version(package: str) -> str:
    if package == "torch":
        return str(torch.__version__)  # with CUDA's version
    return version_of(package) or ("of torch" if find_spec(package) else "absent")  # ROCm's torch brings its triton


def _versions(device: torch.device) -> tuple[bool | None, str]:
    found = versions()
    complete = device.type == "cpu" or found["triton"] != "absent"
    missing = "" if complete else "; kernels on a GPU need triton: pip install triton"
    return complete, ", ".join(f"{name} {number}" for name, number in found.items()) + missing


def _device(device: torch.device) -> tuple[bool | None, str]:
    if device.type == "cpu":
        return True, f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    found = torch.cuda.get_device_properties(device)
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    more = f"; {torch.cuda.device_count()} devices" if torch.cuda.device_count() > 1 else ""
    return True, f"{device}: {found.name}, {human_bytes(found.total_memory)}, capability {capability}, {runtime}{more}"


def _backend(device: torch.device) -> tuple[bool | None, str]:
    x = torch.ones(8, device=device)
    ran = implementation(kernels.select, x, x[0], 8)
    expected = "numba" if device.type == "cpu" else "triton"
    if os.environ.get("THINWIRE_BACKEND"):
        return None, f"{ran}, as THINWIRE_BACKEND={os.environ['THINWIRE_BACKEND']} says"
    every = [found for found in vars(kernels).values() if isinstance(found, Kernel)]
    own = sum(each.on(kernels.select.backend(x, x[0], 8)) is not each.reference for each in every)
    return ran == expected, f"{ran}; {own} of {len(every)} kernels have an implementation of their own"


ROWS: Mapping[str, Callable[[torch.device], tuple[bool | None, str]]] = MappingProxyType(
    {
        "versions": _versions,
        "device": _device,
        "kernels": _backend,
        "process groups": lambda _: (True, ", ".join(n for n in _BACKENDS if getattr(dist, f"is_{n}_available")())),
    }
)
"""What is reported, by name."""
