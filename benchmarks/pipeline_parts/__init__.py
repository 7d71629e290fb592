"""What sparsified boundaries between pipeline stages do to training."""
