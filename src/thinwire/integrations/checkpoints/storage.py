"""A rank's state as named tensors, as torch.distributed.checkpoint stores them, and reading them back by name.

Of plain tensors with one name on several ranks, torch.distributed.checkpoint keeps one rank's. So every name starts
with the rank: `rank 3/header`, and `rank 3/0/layer.weight/residual` for a field of the first memory. The header is JSON
with its checksum in front. It holds the rest of the state, the ranks of the group, and a digest of each tensor: storage
gives no alarm when a bit of a tensor has changed.
"""

import json
import os
import re
import warnings
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from thinwire.integrations.membership.redistribution import waits
from thinwire.integrations.training.drift import digest

_HEADER = re.compile(r"(?:(.+)\.)?rank (\d+)/header")
_PLAIN = re.compile(r"(.+\.)?memories\.\d+\..+")


@runtime_checkable
class Reader(Protocol):
    """What we need of a torch.distributed.checkpoint.StorageReader."""

    def read_metadata(self) -> Any:
        """Return what the checkpoint holds."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read what is planned."""


Saved = str | os.PathLike[str] | Reader


@final
class Storage:
    """The entries that a checkpoint holds under one key (None: the only one), or ValueError; `ranks` have saved any."""

    def __init__(self, saved: Saved, key: str | None) -> None:
        import torch.distributed.checkpoint as dcp  # takes seconds, and only who loads needs it

        self._dcp: Any = dcp  # whose names are not exported, as mypy has it
        try:
            self._reader: Any = saved if isinstance(saved, Reader) else self._dcp.FileSystemReader(saved)
            self._kinds: dict[str, Any] = self._reader.read_metadata().state_dict_metadata
        except Exception as error:
            raise ValueError(f"the checkpoint {saved} cannot be read: {_reason(error)}") from error
        headers = [match.groups(default="") for name in self._kinds if (match := _HEADER.fullmatch(name))]
        chosen = _chosen(key, sorted({under for under, _ in headers}), self._kinds)
        self._prefix = f"{chosen}." if chosen else ""
        self.ranks = sorted(int(rank) for under, rank in headers if under == chosen)

    def blank(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return tensors for these entries, with any values. Raises ValueError if one is not there."""
        if missing := [name for name in names if self._prefix + name not in self._kinds]:
            raise ValueError(f"{missing[0]} is not in the checkpoint")
        kinds = {name: self._kinds[self._prefix + name] for name in names}
        return {name: torch.empty(kind.size, dtype=kind.properties.dtype, device="cpu") for name, kind in kinds.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return these entries. Raises ValueError if one cannot be read."""
        tensors = self.blank(names)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # said of no_dist
                wanted = {self._prefix + name: x for name, x in tensors.items()}
                self._dcp.load(wanted, storage_reader=self._reader, no_dist=True)
        except (Exception, self._dcp.CheckpointException) as error:  # the latter is no Exception
            raise ValueError(_reason(error)) from error
        return tensors

    def read_each(self, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return these entries and, for those that cannot be read, why."""
        try:
            return self.read(names), {}
        except ValueError:  # one of them; reading all at once is faster
            found, unreadable = dict[str, Tensor](), dict[str, str]()
        for name in names:
            try:
                found |= self.read([name])
            except ValueError as error:
                unreadable[name] = str(error)
        return found, unreadable


def _chosen(key: str | None, found: Sequence[str], names: Collection[str]) -> str:
    if key in found:
        return str(key)
    if not found and any(map(_PLAIN.fullmatch, names)):
        raise ValueError(
            "this checkpoint holds a handle's own state_dict(), of which torch.distributed.checkpoint keeps one "
            "rank's: save thinwire.Checkpoint(handle) instead"
        )
    if not found:
        raise ValueError("this checkpoint holds nothing of thinwire's: save thinwire.Checkpoint(handle)")
    if key is not None or len(found) > 1:
        raise ValueError(f"key is {key!r}; this checkpoint has states of thinwire under {', '.join(map(repr, found))}")
    return found[0]


def _reason(error: BaseException) -> str:
    """Return the cause in a line: torch.distributed.checkpoint's own error lists failures by rank, with tracebacks."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]:.200}"


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
