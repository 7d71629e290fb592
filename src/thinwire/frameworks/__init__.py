"""Frameworks' front doors: a thin module each, imported only by who uses it."""
