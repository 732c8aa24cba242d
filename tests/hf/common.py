"""Every condition and every option that has parameters of its own, as folders in transformers."""

import torch

from interdomain.model import CONDITIONS

from ..model.common import OPTIONS

CASES = {
    **{condition: (condition, {}) for condition in CONDITIONS},
    "all": ("interdomain", OPTIONS["all"]),  # rff, normalised, gated, grouped heads, diagonal C
    "kv-identity": ("single-query", dict(n_kv_heads=1, c_form="identity")),
}
KINDS = ("interdomain", "softmax", "s4d", "all")  # one of each kind of state

EXPECTED = "INTERDOMAIN_TRANSFORMERS_EXPECTED"  # what transformers' version is to begin with, where that is given

VOCAB, TOKENS = 420, 400  # the last rows are no tokens
# Random models of random weights: whatever the logits' rounding, the largest of 420 stands out.
CLOSE = dict(rtol=1e-4, atol=1e-4)


def random_texts(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """[B, T], without control tokens."""
    return torch.randint(3, TOKENS, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(model, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    """The whole text again for every token: the model itself, no state."""
    for _ in range(steps):
        tokens = torch.cat([tokens, model(tokens)[:, -1:, :TOKENS].argmax(-1)], dim=1)
    return tokens
