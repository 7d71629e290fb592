"""How fast each problem learns with each optimizer: the one place for the bench's learning rates."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Rates(NamedTuple):
    """Learning rates, constant over a run: of SGD with momentum 0.9, of AdamW, and of Muon.

    Muon's updates are scaled to the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so the two rates compare. What
    is no matrix trains with AdamW, at AdamW's rate.
    """

    sgd: float
    adamw: float
    muon: float


RATES: Mapping[str, Rates] = MappingProxyType(
    {
        "transformer": Rates(sgd=0.1, adamw=2e-3, muon=4.5e-3),
        "lstm": Rates(sgd=2.0, adamw=2e-3, muon=2e-3),
        "lstm_sparse": Rates(sgd=2.0, adamw=2e-3, muon=2e-3),
        "mlp": Rates(sgd=0.05, adamw=1e-3, muon=2e-3),
        "resnet20": Rates(sgd=0.05, adamw=2e-3, muon=2e-3),
        "vgg": Rates(sgd=0.05, adamw=1e-3, muon=2e-3),
        "dlrm": Rates(sgd=0.1, adamw=2e-3, muon=2e-3),
        "xml": Rates(sgd=10.0, adamw=1e-3, muon=2e-3),
    }
)
"""By the problem's name."""
