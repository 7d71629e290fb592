"""Formats: how does one number travel in a few bits?"""

from thinwire.formats.base import Format
from thinwire.formats.coded import Coded
from thinwire.formats.magnitudes import Magnitudes
from thinwire.formats.offset_float import OffsetFloat, balanced_eps
from thinwire.formats.scaled import Levels, Sign, Ternary

__all__ = ["Coded", "Format", "Levels", "Magnitudes", "OffsetFloat", "Sign", "Ternary", "balanced_eps"]
