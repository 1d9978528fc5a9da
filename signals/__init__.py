"""Rewards out: session events on a topic become outcomes, rewards and training samples in a lake."""
