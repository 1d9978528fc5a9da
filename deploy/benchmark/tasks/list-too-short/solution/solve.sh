#!/bin/sh
set -eu
cd /workspace
sed -i 's/n - 1/n/' shop.py
