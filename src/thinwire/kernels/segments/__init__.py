"""What kernels that take several vectors in one launch on a GPU share."""
