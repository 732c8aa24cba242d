"""Models with every kind of state and of feature map, as folders in transformers."""

import sys

import pytest
import torch

from interdomain.model.config import FIXED_STATE

from ..model.common import OPTIONS

CASES = {
    **{
        condition: (condition, {}) for condition in ("interdomain", "softmax", "s4d", "dual-linear")
    },
    "all": ("interdomain", OPTIONS["all"]),  # rff, normalised, gated, grouped heads, diagonal C
    "hybrid": ("interdomain", OPTIONS["hybrid"]),
    "window": ("softmax", OPTIONS["window"]),
    "hybrid, window": ("interdomain", OPTIONS["hybrid, window"]),
    **{condition: (condition, {}) for condition in FIXED_STATE},
    "unconvolved": ("interdomain", OPTIONS["no conv"]),
    "gla-convolved": ("gla", OPTIONS["conv"]),
    "mamba2-unconvolved": ("mamba2", OPTIONS["no conv"]),
    "kv-identity": (
        "single-query",
        dict(n_kv_heads=1, c_form="identity", readout="hermitian", output_norm="soft"),
    ),
}
KINDS = (
    "interdomain",
    "softmax",
    "s4d",
    "all",
    "hybrid, window",
    "mamba2",
)  # one of each kind of state
each_case = pytest.mark.parametrize("case", CASES)
each_kind = pytest.mark.parametrize("case", KINDS)

EXPECTED = "INTERDOMAIN_TRANSFORMERS_EXPECTED"  # what transformers' version begins with, where that is given
VOCAB, TOKENS = 420, 400  # the last rows are no tokens
CLOSE = dict(rtol=1e-4, atol=1e-4)  # of logits in float32
ON = dict(do_sample=False, eos_token_id=None)  # generate to the end


def random_texts(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """[B, T], without control tokens."""
    return torch.randint(3, TOKENS, (batch, length), generator=torch.Generator().manual_seed(seed))


def code_of(model, file: str = "modeling"):
    """The module of a folder's own code, or the package's, that a model is made of: `modeling` or `plain`."""
    return sys.modules[type(model).__module__.replace("modeling_", f"{file}_")]


@torch.no_grad()
def greedy(model, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    """The whole text again for every token: the native model itself, no state."""
    for _ in range(steps):
        tokens = torch.cat([tokens, model(tokens)[:, -1:, :TOKENS].argmax(-1)], dim=1)
    return tokens


def padded(rows, side: str, value: int = 9):
    """(tokens [B, T], attention_mask [B, T]) of rows [1, T'] of unequal length."""
    T = max(row.shape[1] for row in rows)

    def filled(row, value):
        more = torch.full((1, T - row.shape[1]), value)
        return torch.cat([more, row] if side == "left" else [row, more], dim=1)

    return torch.cat([filled(row, value) for row in rows]), torch.cat(
        [filled(row * 0 + 1, 0) for row in rows]
    )
