"""Checkpoints of other programs, to and from ours. Imports no Paddle, and executes nothing that a file holds."""
