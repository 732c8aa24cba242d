"""Metrics, curves, validation and notes of a run."""
