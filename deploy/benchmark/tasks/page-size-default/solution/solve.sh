#!/bin/sh
set -eu
cd /workspace
sed -i 's/size=20/size=50/' pages.py
