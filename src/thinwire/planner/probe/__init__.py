"""Measuring links, candidates and backward on all ranks of a group at once. All of these are collectives."""

from thinwire.planner.probe.candidates import probe_candidates
from thinwire.planner.probe.links import Links, ping, probe_links, probe_tiers
from thinwire.planner.probe.measure import Backward, probe_backward

__all__ = ["Backward", "Links", "ping", "probe_backward", "probe_candidates", "probe_links", "probe_tiers"]
