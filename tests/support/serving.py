"""Fixtures: serving."""
