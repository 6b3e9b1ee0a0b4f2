"""Bytes held against each other: replicas, ties, oracles, digests, two checkpoints."""
