"""Fixtures: kafka."""
