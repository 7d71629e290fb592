"""Hashing indices to slots of a table, and coding indices that are in slot order."""
