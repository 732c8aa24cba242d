"""Token mixers: the interface (base), interdomain attention, softmax, and the baselines with a
state of fixed size.
"""
