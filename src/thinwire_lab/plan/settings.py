"""Settings of NCCL and Gloo that make a fast network look slow."""

from collections.abc import Iterator, Mapping
from pathlib import Path

_VIRTUAL = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel")
_OFF = {
    "NCCL_P2P_DISABLE": "GPUs of this host then copy through its memory",
    "NCCL_SHM_DISABLE": "ranks of this host then talk through the network",
}


def complaints(environment: Mapping[str, str], system: Path = Path("/sys/class")) -> list[str]:
    """Return what in the environment slows the network down, in sentences. system: where Linux lists its devices."""
    return [*_interfaces(environment, system / "net"), *_switched_off(environment, system / "infiniband")]


def _interfaces(environment: Mapping[str, str], devices: Path) -> Iterator[str]:
    speeds = {each.name: _speed(each) for each in sorted(devices.glob("*")) if (each / "device").exists()}
    best = max(speeds, key=lambda name: speeds[name], default="")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        name = environment.get(variable, "").lstrip("=").partition(",")[0]
        if name.startswith(_VIRTUAL):
            yield f"{variable}={name} names no network card: set it to what `ip route get <the other host>` prints."
        elif name in speeds and speeds[name] < speeds[best]:
            yield (
                f"{variable}={name} is a card of {_rate(speeds[name])}, and {best} is one of {_rate(speeds[best])}: if "
                f"it reaches the other hosts, set {variable}={best}."
            )


def _switched_off(environment: Mapping[str, str], adapters: Path) -> Iterator[str]:
    found = ", ".join(each.name for each in sorted(adapters.glob("*")))
    if found and (environment.get("NCCL_IB_DISABLE") == "1" or environment.get("NCCL_NET") == "Socket"):
        variable = "NCCL_IB_DISABLE" if environment.get("NCCL_IB_DISABLE") == "1" else "NCCL_NET"
        yield f"{variable} keeps NCCL off this host's InfiniBand ({found}): unset it if the port is cabled."
    for variable, effect in _OFF.items():
        if environment.get(variable) == "1":
            yield f"{variable}=1 is set, and {effect}: unset it unless something hangs without."


def _speed(device: Path) -> int:
    """Return Mbit/s, 0 if the card does not say."""
    try:
        return max(0, int((device / "speed").read_text()))
    except (OSError, ValueError):
        return 0


def _rate(speed: int) -> str:
    return f"{speed / 1000:g} Gbit/s" if speed else "unknown speed"
