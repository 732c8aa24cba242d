"""Small models of every kind, with weights at which each part of the mixer is felt."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from interdomain.model import CONDITIONS, ModelConfig, Transformer, build_config
from interdomain.model.config import FIXED_STATE
from interdomain.model.feature_maps import FEATURE_MAPS

THETA, EPS = 500.0, 1e-3  # not the defaults: code that forgets one computes something else
SMALL = dict(
    dim=32,
    n_layers=2,
    n_heads=4,
    head_dim=8,
    n_basis=6,
    vocab_size=61,
    max_seq_len=128,
    rope_theta=THETA,
    norm_eps=EPS,
)
# Two heads of 16; of Mamba-2, whose keys are 8 wide, four.
FIXED = dict(n_basis=4)
MAMBA2 = dict(n_basis=4, state_heads=4)
WIDE = dict(dim=192, n_heads=2, head_dim=96)  # the head of the 760M row

# One switch at a time, and all of them at once.
OPTIONS = {
    "plain": {},
    "diagonal": dict(c_form="diagonal"),
    "identity": dict(c_form="identity"),
    "real": dict(readout="real", output_norm="rms"),
    "hermitian": dict(readout="hermitian", output_norm="soft"),
    "rff": dict(feature_map="rff"),
    "normalize": dict(normalize=True),
    "elu": dict(feature_map="elu", normalize=True),
    "softplus": dict(feature_map="softplus"),
    "favor": dict(feature_map="favor", normalize=True, n_kv_heads=2),
    "gate": dict(output_gate=True, gate_function="silu"),
    "kv1": dict(n_kv_heads=1),
    "kv2": dict(n_kv_heads=2),
    "head96": WIDE,
    "all": dict(
        feature_map="rff",
        normalize=True,
        output_gate=True,
        n_kv_heads=2,
        c_form="diagonal",
        readout="hermitian",
    ),
    "hybrid": dict(softmax_every=2),
    "hybrid, window": dict(layers=["softmax", "interdomain-norope"], window=7, n_kv_heads=2),
    "hybrid of recurrences": dict(layers=["dual-linear-norope", "interdomain"]),
    "window": dict(window=7),
    "no conv": dict(conv_width=0),
    "conv": dict(conv_width=3),
}


# A map without an option of its own; test_mixer.py has the formula of each.
options_of_maps = {options.get("feature_map") for options in OPTIONS.values()}
OPTIONS |= {
    name: dict(feature_map=name, normalize=xi.needs_ratio)
    for name, xi in FEATURE_MAPS.items()
    if xi and name not in options_of_maps
}

# Every condition, every switch, and where a switch meets other code in another condition.
VARIANTS = [
    *((condition, "plain") for condition in CONDITIONS),
    *(("interdomain", option) for option in OPTIONS if option not in ("plain", "window", "conv")),
    *(
        ("softmax", "kv2"),
        ("softmax", "head96"),
        ("softmax", "window"),
        ("interdomain-norope", "all"),
    ),
    *(
        ("single-query", "identity"),
        ("single-query", "kv1"),
        ("single-query", "normalize"),
        ("single-query", "favor"),
    ),
    *(("dual-linear", "rff"), ("dual-linear", "diagonal"), ("s4d", "identity"), ("s4d", "gate")),
    *(("gated-deltanet", "hybrid"), ("gla", "conv"), ("mamba2", "no conv")),
]
# The same without switches that no token's place in time can meet: forms of C, feature maps, gates, widths of heads.
POINTWISE = (
    "diagonal",
    "identity",
    "real",
    "hermitian",
    "rff",
    "elu",
    "softplus",
    "gate",
    "head96",
    "kv1",
)
IN_TIME = [(condition, option) for condition, option in VARIANTS if option not in POINTWISE]


def small_config(condition: str, **overrides) -> ModelConfig:
    fixed = MAMBA2 if condition == "mamba2" else FIXED if condition in FIXED_STATE else {}
    return build_config("debug", condition, **{**SMALL, **fixed, **overrides})


def variant(condition: str, option: str = "plain", dtype=torch.float64) -> Transformer:
    return lively(small_config(condition, **OPTIONS[option]), dtype)


def lively(config: ModelConfig, dtype=torch.float64) -> Transformer:
    """A model away from its initial values: nothing is zero, one or equal for all heads, and the mixer's output is O(1)."""
    model = Transformer(config)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith((".C", ".c")):
                p.copy_(noise)
            elif ".ssm." in name or p.ndim == 1 or name.endswith("norm.bias"):
                p.add_(0.3 * noise)
            elif p.ndim == 2 and "tok" not in name:
                p.copy_(noise * p.shape[1] ** -0.5)
            else:
                p.copy_(noise)
    return model.to(dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_exact(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for the rounding of float64: the same numbers are summed in another order. Logits are O(1) to O(10)."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def assert_same_tensors(found, wanted) -> None:
    """Bitwise equal, with the same names and dtypes."""
    torch.testing.assert_close(dict(found), dict(wanted), rtol=0, atol=0)


def random_tokens(config: ModelConfig, batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(
        config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def positions_of(lengths) -> torch.Tensor:
    """Positions in documents of these lengths, packed row by row."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [
            x.numel()
            for x in (out if isinstance(out, tuple | list) else [out])
            if isinstance(x, torch.Tensor)
        ]
        self.largest = max(self.largest, *sizes, 0)
        return out
