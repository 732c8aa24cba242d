"""Context parallelism of the fixed-state baselines: the ranks have contiguous shards of the same sequences, in order.

A shard's recurrence is affine in the state S before it: A S + B is the state after it, and to an output that a zero state has
S^T c_t is added. A is a decay per channel, or of the delta rules a K x K matrix. Every rank gathers A and B of all, of one size
for every T, and makes from those before it the state before its shard.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shard import Part, gather_shards
from .fixed_state_scan import first_tokens

# Shapes: B batch, T tokens of a shard, H heads, G heads of queries and keys, K key width, V value width, D 1 or K.


def sharded_recurrence(
    run: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    documents: Tensor | None,
    shard: Part,
) -> tuple[Tensor, Tensor]:
    """`recurrence` of a shard's tokens, of which document 0 goes on from the shard before. Collective.

    run: `recurrence` on this rank alone. The other arguments, and what is returned, are as there.
    """
    dtype, V = torch.promote_types(v.dtype, torch.float32), v.shape[-1]
    if beta is not None:
        # Columns of a state do not meet. Those of the identity, to which nothing is added, become A, and their outputs c.
        identity = torch.eye(k.shape[-1], dtype=dtype, device=v.device).expand(v.shape[0], v.shape[2], -1, -1)
        start = F.pad(identity, (V, 0))
        o, S = run(q, k, F.pad(v, (0, k.shape[-1])), log_decay, beta, initial_state=start, documents=documents)
        (o, c), (added, passed) = o.split([V, k.shape[-1]], dim=-1), S.split([V, k.shape[-1]], dim=-1)
    else:
        assert log_decay is not None
        o, added = run(q, k, v, log_decay, documents=documents)
        decay = log_decay.to(dtype).view(*v.shape[:3], -1)  # [B, T, H, D]
        if documents is not None:
            decay = decay.masked_fill(first_tokens(documents)[..., None, None], -torch.inf)
        from_start = decay.cumsum(1).exp()
        c, passed = q * from_start, from_start[:, -1, :, :, None].expand(-1, -1, k.shape[-1], -1)
    everyone = gather_shards(torch.cat([added, passed], dim=-1), shard.size, shard.group)

    def after(added: Tensor, passed: Tensor, S: Tensor) -> Tensor:
        return added + (passed * S if beta is None else passed @ S)

    with torch.autocast(v.device.type, enabled=False):
        S = everyone[:0, ..., :V].sum(0)  # zeros that depend on it: every rank takes part in the backward pass
        for before in everyone[: shard.rank]:
            S = after(before[..., :V], before[..., V:], S)
        o = o + (c.to(dtype).transpose(1, 2) @ S).transpose(1, 2)
        return o.to(v.dtype), after(added, passed, S)
