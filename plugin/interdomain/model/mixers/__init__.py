"""Token mixers: the interface, interdomain attention, softmax, and baselines of fixed state."""
