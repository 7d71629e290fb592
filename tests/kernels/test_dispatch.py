"""THINWIRE_BACKEND: the way out where a device's kernel is wrong."""

import os
import subprocess
import sys

import pytest
import torch

from thinwire import kernels
from thinwire.kernels import dispatch


def test_the_reference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4)
    assert kernels.largest.backend(x, 2) == "cpu"
    monkeypatch.setattr(dispatch, "_ONLY_REFERENCE", True)
    assert kernels.largest.backend(x, 2) == "reference"


@pytest.mark.parametrize(("asked", "only"), [(None, False), ("", False), ("reference", True)])
def test_what_the_variable_says(asked: str | None, only: bool) -> None:
    assert dispatch.only_reference(asked) is only


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="THINWIRE_BACKEND='triton' is unknown; expected reference, or unset it"):
        dispatch.only_reference("triton")


@pytest.mark.slow
def test_the_variable_is_read_at_import() -> None:
    script = "import torch; from thinwire import kernels; print(kernels.largest.backend(torch.ones(4), 2))"
    environment = os.environ | {"THINWIRE_BACKEND": "reference"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "reference"
