#!/bin/sh
set -eu
cd /workspace
sed -i 's/^MAX_UPLOAD = 16$/MAX_UPLOAD = 40  # T-71/' files.py
