"""Benchmark: task folders and the runner that scores a checkpoint on them."""
