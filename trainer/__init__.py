"""One update: samples and the serving checkpoint become a candidate checkpoint."""
