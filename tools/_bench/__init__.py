"""Parts of the benchmarks and of check-kernels."""
