"""What each kernel is tried on, by families of kernels."""

from collections.abc import Mapping
from types import MappingProxyType

from thinwire_lab.check.cases import coding, picking, placing, transforms
from thinwire_lab.check.material import Case

CASES: Mapping[str, Case] = MappingProxyType({**picking.CASES, **placing.CASES, **coding.CASES, **transforms.CASES})
"""How each kernel is tried, by its name in `thinwire.kernels`."""

__all__ = ["CASES", "Case"]
