"""Formats: how does one number travel in a few bits?"""

from thinwire.formats.base import Format
from thinwire.formats.coded import Coded
from thinwire.formats.levels import Levels
from thinwire.formats.magnitudes import Magnitudes
from thinwire.formats.offset_float import OffsetFloat, balanced_eps
from thinwire.formats.sign import Sign
from thinwire.formats.ternary import Ternary

__all__ = ["Coded", "Format", "Levels", "Magnitudes", "OffsetFloat", "Sign", "Ternary", "balanced_eps"]
