#!/bin/sh
set -eu
cd /workspace
sed -i 's/^def visit(count):$/def visit(count):\n    # T-62\n    LOG.append(count)/' audit.py
