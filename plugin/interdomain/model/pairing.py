"""The values that a readout pairs with a key, for `inspect-model`.

They follow from the mixer's parameters only. The output of the interdomain mixer is a sum over
pairs of tokens, o_t = sum_ij (q_t . k_i) w(t - i, t - j) v_j. A query that matches only the key of
s tokens ago reads the value of r tokens ago with the weight w(s, r): docs/paper.md.
"""

import torch
from torch import Tensor

from interdomain.scan import interdomain_scan

from .mixers.interdomain import InterdomainMixer

# Shapes: H heads of the state, L lags. Here B = T = R = D = L.

LAGS = 64  # tokens that the weights go back


@torch.no_grad()
def pairing(mixer: InterdomainMixer, lags: int = LAGS) -> Tensor:
    """Computes w [H, s, r] by the scan itself.

    Every token has a key and a value of its own (a row of the identity). The last token of each of
    L texts asks for another key.

    Args:
        mixer: A mixer with the query readout.
        lags: L, how many tokens the weights go back.
    """
    log_decay, mixing = mixer.ssm_tensors([mixer])[0]
    one_hot = torch.eye(lags, dtype=log_decay.dtype, device=log_decay.device)
    H = len(log_decay)
    keys = one_hot[None, :, None].expand(lags, -1, H, -1).contiguous()  # [B, T, H, R]
    # The last query of text b is the key of token b; its output has value j in channel j.
    queries = torch.zeros_like(keys)
    queries[:, -1] = one_hot[:, None]
    o, _ = interdomain_scan(queries, keys, keys, log_decay, mixing)
    last = o[:, -1].transpose(0, 1)  # [H, key, value], by the tokens' places
    # The last place is 0 tokens ago.
    return last.flip(1, 2)


def by_head(weights: Tensor) -> dict[str, list[float]]:
    """Summarises the weights [H, s, r] of each head.

    Args:
        weights: w(s, r) of the value r tokens ago, for a query that matches the key s tokens ago.
    Returns:
        "own value": The mean weight of a key's own value over the root mean square of all weights.
        "own value positive": The share of the own weights that are positive.
    """
    own = weights.diagonal(dim1=1, dim2=2)
    scale = weights.square().mean((1, 2)).sqrt()
    relative = own.mean(1) / scale
    positive = (own > 0).to(weights.dtype)
    return {
        "own value": relative.tolist(),
        "own value positive": positive.mean(1).tolist(),
    }
