"""The paper's parameter counts to the last digit, and the counts of README's table."""

import pytest

from interdomain.model import CONDITIONS, build_config, count_parameters, meta_model

SIZES = ("125M", "350M", "760M", "1.3B")
COUNTS = {
    # Table 3 of the paper.
    "softmax": [134_105_856, 373_867_520, 777_856_512, 1_345_423_360],
    "interdomain": [135_416_208, 377_360_768, 781_498_752, 1_352_406_784],
    "s4d": [135_425_424, 377_385_344, 781_523_328, 1_352_455_936],
    # Beside embeddings, MLP and norms, a layer of width d with H heads has for GLA 5 d^2 of
    # matrices, 2 x 16 d + d of the gate and d / H of the norm; for DeltaNet 4 d^2, H d for beta and
    # 4 taps on 3 d; for gated DeltaNet another d^2, H d and 2 H; for Mamba-2 6 d^2, 2 x 128 d for B
    # and C, H d, 5 numbers on 2 d + 256 channels, 3 H and a norm over 2 d.
    "gla": [141_490_944, 399_850_496, 835_702_272, 1_447_714_816],
    "mamba2": [150_968_928, 431_604_992, 902_785_920, 1_563_103_744],
    "deltanet": [134_247_168, 374_266_880, 778_526_208, 1_346_412_544],
    "gated-deltanet": [141_352_776, 399_531_200, 835_370_784, 1_447_469_440],
    # Only 125M.
    "single-query": [135_462_288],
    "dual-linear": [135_379_344],
    "interdomain-paired": [135_416_208 + 12 * 64],  # a norm of 64 in each of 12 layers
}


def count(size, condition="interdomain", **options):
    return count_parameters(meta_model(build_config(size, condition, **options)))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_table(condition):
    """RoPE has no parameters."""
    row = COUNTS[condition.removesuffix("-norope").removesuffix("-rope")]
    found = [count(size, condition) for size in SIZES[: len(row)]]
    assert found == row


def test_sizes_that_are_not_in_the_paper():
    """Widths, layers and heads are Llama's; softmax's 7B is as large as Llama 2's."""
    assert count("7B", "softmax") == 6_738_415_616
    assert count("7B") == 6_748_517_376
    assert count("70B") == 65_084_490_752


def test_switches():
    """12 layers of width 768, 12 heads, M = 64. A convolution has 5 numbers per channel."""
    found = [
        count("125M", output_gate=True),
        count("125M", c_form="diagonal"),
        count("125M", feature_map="rff"),
        count("125M", n_kv_heads=1),
    ]
    differences = [
        12 * 768**2,
        -12 * 12 * 2 * (64**2 - 64),
        # the scales and biases of the norms of keys and values
        -12 * (2 * 64 + 2 * 768),
        # Eleven heads less have no keys and values of width 704, and no dt, A and C.
        -12 * (2 * 768 * 704 + 7 * 704 + 11 * (1 + 2 * 64 + 2 * 64**2)),
    ]
    assert found == [135_416_208 + difference for difference in differences]
