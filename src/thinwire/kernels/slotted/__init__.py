"""Indices in slot order, region by region: the code of each slot, packed."""
