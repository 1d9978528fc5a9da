"""Fixtures: release."""
