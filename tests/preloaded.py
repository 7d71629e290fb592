"""What each rank would import or set up for itself: done once, by the process that ranks are forked from."""

import os
import warnings
from contextlib import suppress
from importlib import import_module
from unittest.mock import patch

import pytest
from numba.core.registry import cpu_target

from thinwire.kernels import dispatch

# The first two bring what DDP imports.
LIBRARIES = ["torch.distributed.fsdp", "torch.distributed.tensor.debug", "torch.distributed.checkpoint", "thinwire"]

# Numba would do this when it loads its first loop, in a third of a second.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()

IMPORTED: list[str] = []
for name in [*LIBRARIES, *os.environ.pop("PRELOADED", "").split()]:
    plain = patch.object(dispatch, "_ONLY_REFERENCE", True)  # tests compile nothing where they are imported
    with suppress(Exception, pytest.skip.Exception), warnings.catch_warnings(), plain:
        warnings.simplefilter("ignore")  # to ranks warnings are errors, once they need what could not be imported
        import_module(name)
        IMPORTED.append(name)
