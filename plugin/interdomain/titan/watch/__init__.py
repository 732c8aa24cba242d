"""Metrics, curves and validation of a run."""
