#!/bin/sh
set -eu
cd /workspace
sed -i 's/^RETRIES = 3$/# T-31\nRETRIES = 5/' settings.py
