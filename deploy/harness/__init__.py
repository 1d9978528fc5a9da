"""Harness: tools, sandbox, agent loop and session runner, the same in production, simulation and benchmark."""
