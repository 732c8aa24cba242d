"""Models with every kind of state and of feature map, exported and loaded by transformers."""

import os
import sys

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from interdomain.model.config import FIXED_STATE

from ..model.common import OPTIONS

CASES = {
    "interdomain": ("interdomain", {}),
    "softmax": ("softmax", {}),
    "s4d": ("s4d", {}),
    "dual-linear": ("dual-linear", {}),
    "all": ("interdomain", OPTIONS["all"]),  # rff, normalised, gated, grouped heads, diagonal C
    "hybrid": ("interdomain", OPTIONS["hybrid"]),
    "window": ("softmax", OPTIONS["window"]),
    "hybrid, window": ("interdomain", OPTIONS["hybrid, window"]),
    "unconvolved": ("interdomain", OPTIONS["no conv"]),
    "gla-convolved": ("gla", OPTIONS["conv"]),
    "mamba2-unconvolved": ("mamba2", OPTIONS["no conv"]),
    "kv-identity": (
        "single-query",
        {"n_kv_heads": 1, "c_form": "identity", "readout": "hermitian", "output_norm": "soft"},
    ),
}
CASES |= {condition: (condition, {}) for condition in FIXED_STATE}
# One case of each kind of state.
KINDS = ("interdomain", "softmax", "s4d", "all", "hybrid, window", "mamba2")
# The beginning of the version of transformers that must be installed, if it is set. Then one case of each kind is enough.
EXPECTED = "INTERDOMAIN_TRANSFORMERS_EXPECTED"
each_case = pytest.mark.parametrize("case", KINDS if EXPECTED in os.environ else CASES)
each_kind = pytest.mark.parametrize("case", KINDS)

VOCAB = 420
TOKENS = 400  # the last rows of the vocabulary are no tokens
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # of logits in float32
GREEDY = {"do_sample": False, "eos_token_id": None}  # `generate` does not stop at EOS


def random_texts(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Returns token ids [B, T] without control tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, TOKENS, (batch, length), generator=generator)


def code_of(model, file: str = "modeling"):
    """Returns the module `modeling` or `plain` of the code that a model is made of."""
    return sys.modules[type(model).__module__.replace("modeling_", f"{file}_")]


@torch.no_grad()
def greedy(model, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    """Returns the tokens and greedy ones by the native model, which reads all tokens each time."""
    for _ in range(steps):
        next_token = model(tokens)[:, -1:, :TOKENS].argmax(-1)
        tokens = torch.cat([tokens, next_token], dim=1)
    return tokens


def padded(rows, side: str, value: int = 9):
    """Returns tokens [B, T] and attention_mask [B, T] of rows [1, T'] of unequal length."""
    rows = [row[0] for row in rows]
    tokens = pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)
    ones = [torch.ones_like(row) for row in rows]
    return tokens, pad_sequence(ones, batch_first=True, padding_side=side)


def padded_batch(longest: int = 12):
    """Returns tokens and attention_mask of two rows with padding on the left."""
    return padded([random_texts(1, 5), random_texts(1, longest, seed=2)], "left")
