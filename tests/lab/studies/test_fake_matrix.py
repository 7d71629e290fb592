"""`thinwire_lab.studies.fake_matrix` finds a codec that looks at what it sends, and no other."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from thinwire import codecs
from thinwire.payloads import Payload
from thinwire.signals import Signal

FOLDER = str(Path(__file__).parent)
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from thinwire_lab.studies import fake_matrix
from test_fake_matrix import Asks
topk = fake_matrix.ROWS["topk"]
fake_matrix.ROWS = {{"topk": topk, "asks": (Asks(), topk[1])}}
fake_matrix.MEMORIES = {{"none": fake_matrix.MEMORIES["none"]}}
fake_matrix.main(json=fake_matrix.Path(sys.argv[1]), markdown=None)
"""


@dataclass(frozen=True)
class Asks(codecs.Codec):
    """Sends everything, but only after a look at it."""

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Payload:
        """Return all of it."""
        signal.tensor()[0].item()
        return codecs.Identity().encode_signal(signal)


def test_a_codec_that_asks_for_an_element_is_the_only_one_found(tmp_path: Path) -> None:
    found = tmp_path / "cells.json"
    program = PROGRAM.format(folder=FOLDER)  # a process of its own: fake tensors stay in what is cached
    done = subprocess.run([sys.executable, "-c", program, str(found)], capture_output=True, text=True, check=False)
    assert "1 of 2 cells wait" in done.stdout, done.stderr
    cells = json.loads(found.read_text())["cells"]
    assert cells["topk"]["none"]["launches"] > 0
    assert "_local_scalar_dense" in cells["asks"]["none"]["error"]
