"""The paper's parameter counts to the last digit, and the same from a formula that knows no module."""

import pytest

from interdomain.model import ModelConfig, build_config, count_parameters, meta_model

from .common import OPTIONS, VARIANTS, small_config

PAPER = {  # table 3
    "softmax": (134_105_856, 373_867_520, 777_856_512, 1_345_423_360),
    "interdomain": (135_416_208, 377_360_768, 781_498_752, 1_352_406_784),
    "s4d": (135_425_424, 377_385_344, 781_523_328, 1_352_455_936),
}


@pytest.mark.parametrize("condition", PAPER)
def test_table(condition):
    counts = [count_parameters(meta_model(build_config(size, condition))) for size in ("125M", "350M", "760M", "1.3B")]
    assert tuple(counts) == PAPER[condition]


def test_cube_at_125m():
    """The ends of the paper's range over its six mixers at 125M."""
    ends = {"dual-linear": 135_379_344, "single-query": 135_462_288}
    assert {c: count_parameters(meta_model(build_config("125M", c))) for c in ends} == ends


def derived(config: ModelConfig) -> int:
    """Beyond the projections: each SC 5 * dim, N+b 2 * head_dim + 2 * dim, Delta [H], A 2 [H, M], C 2 [H, M, M], c [H, M]."""
    m, dim, R, M = config.mixer, config.dim, config.head_dim, config.mixer.n_basis
    H = m.n_kv_heads or config.n_heads
    kv = H * R
    count = dim * dim + 2 * dim * kv  # one projection as wide as the model beside keys and values: the query's, or ...
    if m.kind == "softmax":
        count += dim * dim
    else:
        # ... without a query, the doubled width of the output projection takes its place.
        out = dim if m.query_readout else 2 * dim
        count += out * dim - (0 if m.query_readout else dim * dim)
        count += (m.conv_width + 1) * (dim * m.query_readout + kv * (1 if m.dual_input else 2))
        count += 0 if m.feature_map == "rff" else 2 * R + 2 * kv
        count += H + 2 * H * M
        count += {"full": 2 * H * M * M, "diagonal": 2 * H * M, "identity": 0}[m.c_form]
        count += 0 if m.query_readout else H * M
        count += out * dim * m.output_gate
    ffn = (8 * dim // 3 + 127) // 128 * 128
    return config.n_layers * (count + 3 * dim * ffn + 2 * dim) + dim + 2 * dim * config.vocab_size


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_formula(condition, option):
    config = small_config(condition, **OPTIONS[option])
    assert count_parameters(meta_model(config)) == derived(config)
