"""The paper's other forms of the scan, in plain PyTorch that autograd differentiates: for comparisons, not for speed.

They import `tables` and `step` of this package. `interdomain.scan` alone imports them, as backends by name.
"""
