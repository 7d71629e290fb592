"""Errors of every method on real gradients, and the papers' claims that such figures decide."""
