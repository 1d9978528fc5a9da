"""Fixtures: spark."""
