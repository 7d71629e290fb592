"""Adding gradients to residuals, and picking with a threshold from a sample: several vectors in one call."""
