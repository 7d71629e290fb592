"""Sparsified activations and gradients between the stages of a split model (Gupta et al. 2021, DCT-MP)."""

from thinwire.pipeline.boundary import Boundary
from thinwire.pipeline.gaussian_sketch import GaussianSketch
from thinwire.pipeline.laplace import LaplaceBoundary
from thinwire.pipeline.sparsify import Sparsified, sparsify
from thinwire.pipeline.tally import Report
from thinwire.pipeline.topk import TopKBoundary
from thinwire.pipeline.topk_gradient import TopKGradient

__all__ = [
    "Boundary",
    "GaussianSketch",
    "LaplaceBoundary",
    "Report",
    "Sparsified",
    "TopKBoundary",
    "TopKGradient",
    "sparsify",
]
