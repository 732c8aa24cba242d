"""Batches of prepared corpora."""
