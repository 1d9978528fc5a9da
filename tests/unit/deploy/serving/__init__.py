"""Unit tests of serving."""
