"""Elements of several vectors at given places, and the largest magnitude of each."""
