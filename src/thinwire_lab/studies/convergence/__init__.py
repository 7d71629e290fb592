"""Parts of the study of convergence: virtual workers in one process, their training, and its results."""
