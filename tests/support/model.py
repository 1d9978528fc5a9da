"""Fixtures: model."""
