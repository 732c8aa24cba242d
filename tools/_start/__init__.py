"""Starts of torchrun, on one node and under SLURM."""
