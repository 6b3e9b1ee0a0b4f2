"""Checkpoints that come without a case.json: what others write, described as a case."""
