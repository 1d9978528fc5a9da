"""Fixtures: harness."""
