"""What the papers' rooms share: gradients to look at, how a claim is judged, and the report."""
