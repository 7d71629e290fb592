"""The conclusions of a plan, in sentences."""

import math

from thinwire.exchanges import Transport
from thinwire.planner import Plan, Profile
from thinwire_lab.show.units import UNKNOWN, human_bytes

UNKNOWN_OPTIMIZER = (
    "thinwire plan: what a method costs in loss depends on the optimizer: name yours, as in --optimizer adamw"
)
_TRANSPORTS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "point_to_point": "point to point"}
_BEYOND = 1e14  # bytes per second: an older probe gave this if more bytes took no longer
_UNITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")


def bit_rate(bandwidth: float) -> str:
    """Return bytes per second in the unit of links: ``6.2 Gbit/s``."""
    if bandwidth >= _BEYOND:
        return "beyond measure"
    bits, unit = 8 * bandwidth, 0
    while bits >= 999.5 and unit < len(_UNITS) - 1:
        bits, unit = bits / 1000, unit + 1
    return f"{bits:.3g} {_UNITS[unit]}"


def title(profile: Profile) -> str:
    """Workers and link, on one line."""
    workers = "1 worker" if profile.world_size == 1 else f"{profile.world_size} workers"
    return f"{workers} · {profile.made.get('link', 'the link of the profile')}"


def origin(measured: Profile, profile: Profile) -> list[str]:
    """Say what was measured, and where that differs from what was asked."""
    seconds = measured.made.get("measuring_seconds")
    took = "" if seconds is None else f"Measuring took {seconds:g} s."
    lines = [str(measured.made.get("model", "")), took]
    if (measured.world_size, measured.links) != (profile.world_size, profile.links):
        lines.append(f"What if: the profile was measured with {title(measured)}.")
    return [line for line in lines if line]


def network(profile: Profile) -> list[tuple[str, str, str]]:
    """Each transport's name, latency and bandwidth."""
    if profile.world_size == 1:
        return []
    return [
        (_TRANSPORTS[name], f"{1e3 * link.latency:.2f} ms", _bandwidth(profile, name))
        for name, link in profile.links.items()
    ]


def _bandwidth(profile: Profile, name: Transport) -> str:
    """Say it, and what was not seen of it."""
    found, most = bit_rate(profile.links[name].bandwidth), profile.unseen.get(name)
    if most is None:
        return found
    seen = f"messages of up to {human_bytes(most)} hardly took longer than tiny ones"
    return f"at least {found}: {seen}" if most else "not measured: this profile is of an older version"


def conclusions(plan: Plan) -> list[str]:
    """Return the predicted step, the break-even, and what happens where nothing pays."""
    lines = [_step(plan), _break_even(plan), plan.expected_loss, plan.missing]
    if not plan.pays and not plan.missing:
        lines.insert(0, 'Nothing pays here: thinwire.attach(model, "auto") then leaves plain DDP.')
    return [line for line in lines if line]


def _step(plan: Plan) -> str:
    dense = f"Predicted step: {1e3 * plan.dense_seconds:.1f} ms uncompressed"
    if not plan.pays:
        return f"{dense}."
    return f"{dense}, {1e3 * plan.seconds:.1f} ms as planned: {speed_up(plan)} times as fast."


def speed_up(plan: Plan) -> str:
    """How many times faster is a step with the plan?"""
    return f"{plan.dense_seconds / plan.seconds:.2f}" if plan.seconds else UNKNOWN


def _break_even(plan: Plan) -> str:
    if plan.profile.world_size == 1 or not plan.rows or 0 in plan.profile.unseen.values():
        return ""
    if math.isinf(plan.break_even):
        return "Compression pays at every bandwidth this machine can saturate."
    if not plan.break_even:  # what was not measured may pay
        return "" if plan.missing else "Compression never pays here, however slow the link."
    if plan.pays:
        return f"Compression stops paying above {bit_rate(plan.break_even)} here."
    return f"Compression would pay below {bit_rate(plan.break_even)} here."
