"""Sparsified activations and gradients between the stages of a split model."""

from thinwire.pipeline.boundary import Boundary, Report, TopKBoundary
from thinwire.pipeline.laplace import LaplaceBoundary
from thinwire.pipeline.sparsify import Sparsified, sparsify

__all__ = ["Boundary", "LaplaceBoundary", "Report", "Sparsified", "TopKBoundary", "sparsify"]
