"""Two further backends of the scan, for comparison: none is the default, and `backend="auto"` never takes them.

    sequential   the recurrence over time in Triton, on CUDA (the paper's scan): sequential.py launches sequential_kernels.py
    fft          FFT convolution in plain PyTorch (the paper's FFT path): fft.py

`interdomain.scan.ops` imports them when they run. They import `interdomain.scan.tables`, nothing else of the scan.
"""
