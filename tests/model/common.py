"""Small models of every kind, with weights at which each part of the mixer matters."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from interdomain.model import CONDITIONS, Transformer, build_config
from interdomain.model.config import FIXED_STATE

from ..scan.common import worst_number

# These are not the defaults: code that forgets to pass one of them computes something else.
THETA = 500.0
EPS = 1e-3
SMALL = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "head_dim": 8,
    "n_basis": 6,
    "vocab_size": 61,
    "max_seq_len": 128,
    "rope_theta": THETA,
    "norm_eps": EPS,
}
# A baseline of fixed state has two heads of 16; Mamba-2, whose keys are 8 wide, has four.
FIXED = {"n_basis": 4}
MAMBA2 = {"n_basis": 4, "state_heads": 4}

# One switch at a time, and all of them at once.
OPTIONS = {
    "plain": {},
    "diagonal": {"c_form": "diagonal"},
    "identity": {"c_form": "identity"},
    "real": {"readout": "real", "output_norm": "rms"},
    "hermitian": {"readout": "hermitian", "output_norm": "soft"},
    "rff": {"feature_map": "rff"},
    "normalize": {"normalize": True},
    "elu": {"feature_map": "elu", "normalize": True},
    "softplus": {"feature_map": "softplus"},
    "favor": {"feature_map": "favor", "normalize": True, "n_kv_heads": 2},
    "gate": {"output_gate": True, "gate_function": "silu"},
    "kv1": {"n_kv_heads": 1},
    "kv2": {"n_kv_heads": 2},
    "head96": {"dim": 192, "n_heads": 2, "head_dim": 96},  # the head of the 760M row
    "all": {
        "feature_map": "rff",
        "normalize": True,
        "output_gate": True,
        "n_kv_heads": 2,
        "c_form": "diagonal",
        "readout": "hermitian",
    },
    "hybrid": {"softmax_every": 2},
    "hybrid, window": {"layers": ["softmax", "interdomain-norope"], "window": 7, "n_kv_heads": 2},
    "hybrid of recurrences": {"layers": ["dual-linear-norope", "interdomain"]},
    "window": {"window": 7},
    "no conv": {"conv_width": 0},
    "conv": {"conv_width": 3},
}
# Every condition, every switch, and the pairs in which a switch runs other code.
VARIANTS = [(condition, "plain") for condition in CONDITIONS]
for option in OPTIONS:
    if option not in ("plain", "window", "conv"):
        VARIANTS.append(("interdomain", option))
VARIANTS += [
    ("softmax", "kv2"),
    ("softmax", "head96"),
    ("softmax", "window"),
    ("interdomain-norope", "all"),
    ("single-query", "identity"),
    ("single-query", "kv1"),
    ("single-query", "normalize"),
    ("single-query", "favor"),
    ("dual-linear", "rff"),
    ("dual-linear", "diagonal"),
    ("s4d", "identity"),
    ("s4d", "gate"),
    ("gated-deltanet", "hybrid"),
    ("gla", "conv"),
    ("mamba2", "no conv"),
]
each_variant = pytest.mark.parametrize(("condition", "option"), VARIANTS)
# Switches that act on each token separately. Tests of the order in time leave them out.
POINTWISE = ("diagonal", "identity", "real", "hermitian", "rff", "elu", "softplus", "gate")
POINTWISE += ("head96", "kv1")
IN_TIME = [variant for variant in VARIANTS if variant[1] not in POINTWISE]


def small_config(condition, **overrides):
    settings = dict(SMALL)
    if condition == "mamba2":
        settings |= MAMBA2
    elif condition in FIXED_STATE:
        settings |= FIXED
    return build_config("debug", condition, **settings | overrides)


def variant(condition, option="plain", dtype=torch.float64):
    return lively(small_config(condition, **OPTIONS[option]), dtype)


def lively(config, dtype=torch.float64):
    """Returns a model in which no parameter is zero, one or equal for all heads.

    The output of its mixers is O(1).
    """
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


def rms_norm(x, norm):
    """Computes an RMS norm of a small model from its definition."""
    mean_square = x.square().mean(-1, keepdim=True)
    return x / (mean_square + EPS).sqrt() * norm.weight


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_near(found, wanted, tolerance, name=""):
    """Fails if two numbers differ by more than the tolerance, and prints the worst pair."""
    assert found.shape == wanted.shape, name
    near = ((found - wanted).abs() <= tolerance).all()
    assert near, f"{name}: {worst_number(found, wanted)}, allowed error {tolerance:.1e}"


def assert_exact(found, wanted):
    """Fails if two tensors differ by more than a different order of sums in float64.

    Logits are O(1) to O(10).
    """
    assert_near(found, wanted, 1e-10)


def assert_same_tensors(found, wanted):
    """Fails if two state dicts are not bitwise equal, with the same names and dtypes."""
    torch.testing.assert_close(dict(found), dict(wanted), rtol=0, atol=0)


def random_tokens(config, batch, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


def prompt_of(model, length):
    """Returns a prompt, [1, length]. Those of two lengths have nothing in common."""
    return random_tokens(model.config, 1, length, seed=length)


def in_pieces(model, x, lengths, state):
    """Returns what a model or a layer gives for pieces of these lengths, one after the other."""
    outputs = []
    for piece in x.split(lengths, dim=1):
        outputs.append(model(piece, state))
    return torch.cat(outputs, dim=1)


def tensors_of(state):
    tensors = []
    for layer in state.layers:
        tensors += layer.tensors().values()
    return tensors


def positions_of(lengths):
    """Returns the positions in documents of these lengths, which are packed row by row."""
    rows = []
    for row in lengths:
        rows.append(torch.cat([torch.arange(length) for length in row]))
    return torch.stack(rows)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result
