"""Indices on their way: moved to where their vectors lie, and checked when they arrive."""
