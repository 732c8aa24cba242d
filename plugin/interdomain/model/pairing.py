"""The value that a readout pairs with a key: weights that depend on the mixer's parameters alone, for `inspect-model`.

The output of the interdomain mixer is a sum over pairs of tokens: o_t = sum_ij (q_t . k_i) w(t - i, t - j) v_j. A query that
matches the key of s tokens ago, and no other, reads the value of r tokens ago with weight w(s, r): docs/pairing.md.
"""

import torch
from torch import Tensor

from interdomain.scan import interdomain_scan

from .mixers.interdomain import InterdomainMixer

LAGS = 64  # tokens that the weights go back


@torch.no_grad()
def pairing(mixer: InterdomainMixer, lags: int = LAGS) -> Tensor:
    """w [H, s, r] of the heads of the state, by the scan itself: every token has a key and a value of its own, and the last
    token of each of several texts asks for another key."""
    log_decay, mixing = mixer.dynamics([mixer])[0]
    own = torch.eye(lags, dtype=log_decay.dtype, device=log_decay.device)
    keys = own[None, :, None].expand(lags, -1, len(log_decay), -1).contiguous()
    queries = torch.zeros_like(keys)
    queries[:, -1] = own[:, None]
    o, _ = interdomain_scan(queries, keys, keys, log_decay, mixing)
    return o[:, -1].transpose(0, 1).flip(1, 2)


def by_head(weights: Tensor) -> dict[str, list[float]]:
    """Numbers of each head of weights [H, s, r]: the mean weight of a key's own value over the root mean square of all weights,
    and the share of the own weights that are positive."""
    diagonal = weights.diagonal(dim1=1, dim2=2)
    scale = weights.square().mean((1, 2)).sqrt()
    return {
        "own value": (diagonal.mean(1) / scale).tolist(),
        "own value positive": (diagonal > 0).to(weights.dtype).mean(1).tolist(),
    }
