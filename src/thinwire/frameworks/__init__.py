"""Integrations with training frameworks. Each module needs its framework, so import the one you use."""
