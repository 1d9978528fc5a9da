"""Importers: transcripts people already have, as session events. One module a format."""
