"""A rank's state as named tensors, as torch.distributed.checkpoint stores them, and back.

Of plain tensors with one name on several ranks, torch.distributed.checkpoint keeps one rank's. So every name starts
with the rank: `rank 3/header`, and `rank 3/0/layer.weight/residual` for a field of the first memory. The header is JSON
with its checksum in front. It holds the rest of the state, the ranks of the group, and a digest of each tensor: storage
gives no alarm when a bit of a tensor has changed.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.integrations.membership.redistribution import waits
from thinwire.integrations.training.drift import digest

Header = dict[str, Any]
_CHECKSUM = 8  # hexadecimal digits


def header_name(rank: int) -> str:
    """Return the name of a rank's header."""
    return f"rank {rank}/header"


def named(state: Mapping[str, Any], rank: int, ranks: Sequence[int]) -> dict[str, Tensor]:
    """Return the tensors that `rank` saves of a state. `ranks`: those of its group; all are global ranks."""
    tensors = {
        f"{i}/{name}/{field}": x
        for i, memory in enumerate(state["memories"])
        for name, fields in memory.items()
        for field, x in fields.items()
    }
    digests = {path: digest(x).tolist() for path, x in tensors.items()}
    rest = {key: value for key, value in state.items() if key != "memories"}
    text = json.dumps(rest | {"ranks": list(ranks), "digests": digests}).encode()
    header = torch.frombuffer(bytearray(_checksum(text) + text), dtype=torch.uint8)
    return {header_name(rank): header} | {f"rank {rank}/{path}": x for path, x in tensors.items()}


def opened(header: Tensor) -> Header:
    """Return what a header says. Raises ValueError if it is not as it was saved."""
    raw = header.numpy().tobytes()
    checksum, text = raw[:_CHECKSUM], raw[_CHECKSUM:]
    if checksum != _checksum(text):
        raise ValueError(
            "its header has changed since it was saved, or its file is from another checkpoint, such as that of "
            "another step"
        )
    found: Header = json.loads(text)
    return found


def paths(header: Header, *, notes_only: bool = False) -> list[str]:
    """Return where in a state its tensors lie: all of them, or those that are notes."""
    return [path for path in header["digests"] if not notes_only or not waits(path.rpartition("/")[2])]


def parameter_of(path: str) -> tuple[str, str]:
    """Return the parameter and the field that a tensor's path names."""
    name, _, field = path.partition("/")[2].rpartition("/")
    return name, field


def state_of(header: Header, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state, with those tensors that are given by path. Raises ValueError if one has changed."""
    memories: list[dict[str, dict[str, Tensor]]] = [{} for _ in header["fields"]]
    for path, x in tensors.items():
        if digest(x).tolist() != header["digests"][path]:
            raise ValueError(f"{path} has changed since it was saved")
        name, field = parameter_of(path)
        memories[int(path.partition("/")[0])].setdefault(name, {})[field] = x
    rest_of_it = {key: value for key, value in header.items() if key not in ("ranks", "digests")}
    return rest_of_it | {"memories": memories}


def _checksum(text: bytes) -> bytes:
    return f"{zlib.crc32(text):0{_CHECKSUM}x}".encode()
