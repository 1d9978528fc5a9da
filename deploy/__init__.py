"""Serve, gate, ship: the policy in front of users, and the decision which checkpoint that is."""
