#!/bin/sh
# Verdict for one attempt: 1 or 0 in /logs/verifier/reward.txt. Runs after the agent has stopped.
if python3 -I /tests/check.py; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
