"""Integrations with training frameworks. Each module needs its framework, so import the one you use.

`thinwire.frameworks.lightning`, `thinwire.frameworks.accelerate` and `thinwire.frameworks.transformers`.
"""
