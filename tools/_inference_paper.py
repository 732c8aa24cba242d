"""The paper's figures of inference (appendix "Inference Scaling"), to stand beside ours: another GPU, and labelled so.

ms of a decode step by prefix, at 1.3B; ranges over the prefixes that fitted; GB of peak memory while reading a prompt.
"""

from typing import NamedTuple

GPU = "the paper's, on an RTX 6000 Ada (48 GB)"


class Summary(NamedTuple):
    """One row of the paper's decode tables: ms as (least, most) over prefixes, the longest prefix that fitted, and ratios."""

    softmax: tuple[float, float]
    graphed: tuple[float, float]
    speedup: float  # median softmax, eager, over median interdomain, graphed
    eager: tuple[float, float] | None = None
    fits: tuple[int, int] | None = None  # softmax, interdomain
    flat: float | None = None  # graphed, at 16,384 over at 512
    growth: float | None = None  # softmax, most over least


PREFIXES = (512, 1024, 2048, 4096, 8192, 16_384)

# Figure 4: batch -> curve -> ms at PREFIXES, as far as it ran.
CURVES = {
    1: {
        "softmax, eager": (13.99, 13.93, 13.44, 13.39, 13.46, 13.46),
        "interdomain, graph": (12.42, 12.47, 12.47, 12.51, 12.49, 12.50),
        "interdomain, eager": (30.32, 29.90, 30.50, 30.43, 29.65, 29.57),
    },
    8: {
        "softmax, eager": (14.00, 14.16, 13.99, 13.81, 21.60),
        "interdomain, graph": (15.73, 15.86, 15.93, 15.95, 15.94, 15.98),
        "interdomain, eager": (31.98, 32.05, 32.75, 32.25, 32.48, 32.66),
    },
    16: {
        "softmax, eager": (13.69, 13.51, 13.54, 22.14),
        "interdomain, graph": (19.51, 19.56, 19.56, 19.60),
        "interdomain, eager": (31.66, 31.53, 31.23, 31.18),
    },
    32: {
        "softmax, eager": (13.18, 13.71, 22.75),
        "interdomain, graph": (28.37, 28.49, 28.58),
        "interdomain, eager": (30.11, 30.19, 29.85),
    },
}

# Table 11: batch -> row, 1.3B.
SUMMARY = {
    1: Summary((13.39, 13.99), (12.42, 12.51), 1.08, (29.57, 30.50), (16_384, 16_384)),
    8: Summary((13.81, 21.60), (15.73, 15.98), 0.88, (31.98, 32.75), (8192, 16_384)),
    16: Summary((13.51, 22.14), (19.51, 19.60), 0.70, (31.18, 31.66), (4096, 4096)),
    32: Summary((13.18, 22.75), (28.37, 28.58), 0.48, (29.85, 30.19), (2048, 2048)),
    64: Summary((14.42, 23.87), (59.08, 59.08), 0.40, (54.48, 54.48), (1024, 1024)),
}

# Tables 13 and 14: batch -> size -> row.
SIZES = {
    1: {
        "125M": Summary((6.43, 6.50), (2.45, 2.46), 2.64, flat=1.00),
        "350M": Summary((13.11, 13.19), (5.64, 5.65), 2.33, flat=1.00),
        "760M": Summary((13.10, 13.17), (8.61, 8.64), 1.52, flat=1.00),
        "1.3B": Summary((13.39, 13.99), (12.42, 12.51), 1.08, flat=1.01),
    },
    8: {
        "125M": Summary((6.63, 7.18), (2.93, 3.06), 2.30, fits=(16_384, 16_384), growth=1.08),
        "350M": Summary((13.18, 17.13), (6.92, 7.04), 2.17, fits=(16_384, 16_384), growth=1.30),
        "760M": Summary((13.41, 14.75), (10.77, 10.88), 1.30, fits=(8192, 16_384), growth=1.10),
        "1.3B": Summary((13.81, 21.60), (15.73, 15.98), 0.88, fits=(8192, 16_384), growth=1.56),
    },
}

# Table 12: (batch, prompt) -> GB of softmax whole, interdomain whole, interdomain in chunks of 2,048.
MEMORY = {
    (8, 4096): (14.65, 24.45, 17.58),
    (8, 8192): (21.42, None, 19.90),
    (8, 16_384): (None, None, 25.78),
    (16, 4096): (21.21, None, 26.54),
    (32, 2048): (21.16, 40.97, 36.62),
    (64, 512): (14.59, 24.77, 21.39),
}
