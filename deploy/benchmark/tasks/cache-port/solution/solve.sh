#!/bin/sh
set -eu
cd /workspace
sed -i 's/^PORTS = dict($/PORTS = dict(\n    cache=6379,  # T-19/' ports.py
