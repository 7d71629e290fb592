"""A short run of the fuzzer, as CI has time for."""

import importlib.util
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).parents[2] / "fuzz" / "server.py"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_damaged_messages_change_nothing() -> None:
    spec = importlib.util.spec_from_file_location("fuzz_server", FUZZER)
    assert spec is not None
    assert spec.loader is not None
    fuzzer = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = fuzzer
    spec.loader.exec_module(fuzzer)
    met = fuzzer.main(3000, 0)
    assert {"FrameError", "PayloadError", "update read", "rows read"} <= met.keys()
