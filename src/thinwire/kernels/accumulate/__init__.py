"""Adding gradients to residuals: plainly, with decay, with momentum, or rounded to 16 bits. Joining small ones."""
