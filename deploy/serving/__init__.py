"""Serving: engines, the OpenAI-compatible gateway, capture of tokens, and swaps without a dropped request."""
