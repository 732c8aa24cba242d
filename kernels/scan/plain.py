"""The scan by chunks in real operations that autograd records.

Every runtime of an exported graph has these operations; complex numbers are missing in some.
Exported models use it if the package is not installed, and so does torch.export. Otherwise the
package uses chunkwise.py, which needs less memory in training.

Shapes: B batch, T tokens, H state heads, G query heads per state head, R key features, D value
width, P = R + D channels of a state, M basis functions, L tokens of a chunk, N chunks. Complex
vectors are pairs, [..., M, 2] or [..., 2M].
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .tables import CHUNK, multiply, powers


def is_exporting() -> bool:
    """Returns True under torch.export.

    PyTorch's function of this name is True under torch.compile, too, in 2.11.
    """
    return torch.compiler._is_exporting_flag


def in_order(step: Callable, state: Tensor, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Runs a loop over inputs.

    Under torch.export the loop is one operation for any number of inputs. It then has no gradients:
    gradients for a symbolic number of tokens cannot be translated to ONNX.

    Args:
        step: step(state, [x[n] for x in inputs]) -> (next state, o of this step).
        state: The first state.
        inputs: Tensors whose first axis is n.

    Returns:
        The last state, and all o, stacked.
    """
    if is_exporting():
        # Imported here, because it takes long.
        from torch._higher_order_ops import scan

        return scan(step, state.detach(), [x.detach() for x in inputs])
    outputs = []
    for inputs_of_step in zip(*inputs, strict=True):
        state, o = step(state, inputs_of_step)
        outputs.append(o)
    return state, torch.stack(outputs)


def plain_scan(
    q: Tensor | None, k: Tensor, v: Tensor, theta: Tensor, table: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes `interdomain_scan` or `linear_scan` by chunks of L tokens.

    A chunk starts with S = Lambda^h X, h = L / 2, where X is the state before it. Its token i reads
    Lambda^(i + 1 - h) (S + sum_j Lambda^(h - 1 - j) z_j) over the tokens j up to itself, where z_j
    is k_j beside v_j. So no power leaves the range of float32.

    Args:
        q: Query features, [B, T, H G, R] for G query heads per state head, or None for the linear
            readout.
        k: Key features, [B, T, H, R]. For the linear readout, k and v are the two parts of z.
        v: Values, [B, T, H, D].
        theta: log Lambda as real pairs, [H, M, 2].
        table: W [H, 2M, 2M], or w [H, 2M] for the linear readout, on stacked (Re | Im).
        state: The state before the tokens, [B, H, M, P, 2] with P = R + D channels, or None for
            zeros.

    Returns:
        o [B, T, H G, D], or [B, T, H, P] for the linear readout; and the state after the last
        token.
    """
    B, T, H, R = k.shape
    M = theta.shape[1]
    # One token is a chunk of its own.
    L = 1 if T == 1 else CHUNK
    N = (T + L - 1) // L
    h = L // 2
    i = torch.arange(L, device=k.device)
    # Zeros before the first token fill the first chunk.
    missing = N * L - T
    # An exported graph has one more chunk, of zeros, after the last token. With one chunk only, N
    # would be a constant of the graph.
    extra = int(is_exporting() and T > 1)

    def by_chunk(x: Tensor) -> Tensor:
        # Cuts tokens into chunks: [B, T, H G, width] -> [N, B, H, G, L, width].
        x = F.pad(x.to(theta.dtype), (0, 0, 0, 0, missing, extra * L)).unflatten(2, (H, -1))
        return x.unflatten(1, (N + extra, L)).permute(1, 0, 3, 4, 2, 5)

    def decayed(x: Tensor, factors: Tensor) -> Tensor:
        # Multiplies pairs in the last axis, [..., 2M], by powers of Lambda, [..., M, 2].
        return multiply(factors, x.unflatten(-1, (M, 2))).flatten(-2)

    # Powers of Lambda: with which a token reads S, is added to S, and is added to the S of the next
    # chunk. [H, 1, L, M, 2] for reading, else [H, 1, L, 2M].
    read = powers(theta, i + 1 - h)[:, None]
    write, write_next = (powers(theta, j).flatten(2)[:, None] for j in (h - 1 - i, L + h - 1 - i))
    # From X before the zeros to the first S, from S to S over a chunk, and from S to X, [H, 1, M,
    # 2].
    enter, carry, leave = (powers(theta, i[:1] + n) for n in (h - missing, L, -h))

    # S before every chunk, in a loop over chunks, and S after the last token.
    z = by_chunk(torch.cat((k, v), dim=-1))
    added = (z.mT @ write_next).squeeze(3).unflatten(-1, (M, 2))  # [N, B, H, P, M, 2]
    if state is None:
        state = theta.new_zeros(B, H, M, z.shape[-1], 2)
    first_S = multiply(enter, state.transpose(2, 3))
    carries = carry.expand(N + extra, *carry.shape)

    def next_state(S: Tensor, chunk: list[Tensor]) -> tuple[Tensor, Tensor]:
        # `chunk` is an element of `carries` and one of `added`. S is copied, because the loop of
        # torch.export must not return its own input.
        return multiply(chunk[0], S) + chunk[1], S.clone()

    last, S = in_order(next_state, first_S, [carries, added])
    if extra:
        last = S[-1]
    S = S.flatten(-2)[:, :, :, None]  # [N, B, H, 1, P, 2M]

    # conj(b), as pairs: the real part of a product is then the inner product of the pairs. The
    # table is stacked as (Re | Im), and becomes pairs with negative imaginary parts.
    table = torch.stack((table[:, :M], -table[:, M:]), dim=2).flatten(1, 2)
    if q is None:
        # The linear readout has b = w, and reads all channels.
        b = table[:, None, None]
        first_channel = 0
    else:
        # a = X^k q, b = W a, and b reads the channels of the values.
        q = by_chunk(q)
        first_channel = R
        a = (q @ z[..., :R].mT).tril() @ write + q @ S[..., :R, :]
        W = table.unflatten(2, (2, M)).transpose(2, 3).flatten(2)
        b = decayed(a, read) @ W.mT[:, None]
    b = decayed(b, torch.stack((read[..., 0], -read[..., 1]), dim=-1))

    # The outputs, without the tokens that were added.
    o = (b @ write.mT).tril() @ z[..., first_channel:] + b @ S[..., first_channel:, :].mT
    o = o.permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)[:, missing : missing + T]
    return o.to(v.dtype), multiply(leave, last).transpose(2, 3)
