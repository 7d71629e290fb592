"""Parts of the study of kernels: the kernels, their floors, and the results."""
