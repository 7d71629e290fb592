"""Sparsified activations and gradients between the stages of a split model (Gupta et al. 2021, DCT-MP)."""

from thinwire.pipeline.boundary import Boundary
from thinwire.pipeline.laplace import LaplaceBoundary
from thinwire.pipeline.sparsify import Sparsified, sparsify
from thinwire.pipeline.tally import Report
from thinwire.pipeline.topk import TopKBoundary

__all__ = ["Boundary", "LaplaceBoundary", "Report", "Sparsified", "TopKBoundary", "sparsify"]
