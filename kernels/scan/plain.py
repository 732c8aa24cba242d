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
    """Runs a loop that carries a state: for each n, state, output = step(state, inputs at n).

    Under torch.export the loop is one operation for any number of inputs. It then has no gradients:
    gradients for a symbolic number of tokens cannot be translated to ONNX.

    Args:
        step: step(state, [x[n] for x in inputs]) -> (the next state, the output of this step).
        state: The first state.
        inputs: Tensors whose first axis is n.

    Returns:
        The last state, and the outputs of all steps, stacked along a new first axis.
    """
    if is_exporting():
        # Imported here, because it takes long.
        from torch._higher_order_ops import scan

        return scan(step, state.detach(), [x.detach() for x in inputs])
    outputs = []
    for inputs_of_step in zip(*inputs, strict=True):
        state, output = step(state, inputs_of_step)
        outputs.append(output)
    return state, torch.stack(outputs)


def plain_scan(
    q: Tensor | None, k: Tensor, v: Tensor, theta: Tensor, table: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes `interdomain_scan` or `linear_scan` by chunks of L tokens.

    z_j is k_j beside v_j, and X is the state before a chunk. The chunk uses it as S = Lambda^h X
    with h = L / 2, in the middle of the chunk, so that no power leaves the range of float32. The
    state of its token i is
        X_i = Lambda^(i + 1 - h) (S + sum_(j <= i) Lambda^(h - 1 - j) z_j)
    and its output is Re(b_i^T X^v_i) with b_i = W a_i and a_i = X^k_i q_i; or Re(w^T X_i) in the
    linear readout.

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
    # Cut time into N chunks. One token is a chunk of its own.
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

    # The power of Lambda with which a token of a chunk reads S (`read`, [H, 1, L, M, 2]), is added
    # to S (`write`, [H, 1, L, 2M]), and is added to the S of the next chunk (`write_next`).
    read = powers(theta, i + 1 - h)[:, None]
    write, write_next = (powers(theta, j).flatten(2)[:, None] for j in (h - 1 - i, L + h - 1 - i))
    # The powers that lead from X before the zeros to the first S (`enter`), from S to the next S
    # over a chunk (`carry`), and from S back to X (`leave`), [H, 1, M, 2] each.
    enter, carry, leave = (powers(theta, i[:1] + n) for n in (h - missing, L, -h))

    # S before every chunk, and S after the last token, in a loop over chunks: the next S is carry S
    # + what the tokens of the chunk add.
    z = by_chunk(torch.cat((k, v), dim=-1))
    added = (z.mT @ write_next).squeeze(3).unflatten(-1, (M, 2))  # [N, B, H, P, M, 2]
    if state is None:
        state = theta.new_zeros(B, H, M, z.shape[-1], 2)
    first_S = multiply(enter, state.transpose(2, 3))
    carries = carry.expand(N + extra, *carry.shape)

    def next_state(S: Tensor, chunk: list[Tensor]) -> tuple[Tensor, Tensor]:
        # `chunk` is an element of `carries` and one of `added`. The output is S before the chunk,
        # copied because the loop of torch.export must not return its own input.
        return multiply(chunk[0], S) + chunk[1], S.clone()

    last, S = in_order(next_state, first_S, [carries, added])
    # The S after the last token is that before the additional chunk.
    if extra:
        last = S[-1]
    S = S.flatten(-2)[:, :, :, None]  # [N, B, H, 1, P, 2M]

    # The weights b of the readout, as pairs of conj(b): Re(b x) is then the inner product of the
    # pairs of conj(b) and of x. The table is stacked as (Re | Im), and becomes pairs with negative
    # imaginary parts.
    table = torch.stack((table[:, :M], -table[:, M:]), dim=2).flatten(1, 2)
    if q is None:
        # The linear readout has b = w, and reads all channels.
        b = table[:, None, None]
        first_channel = 0
    else:
        # a = X^k q, b = W a, and b reads the channels of the values.
        q = by_chunk(q)
        first_channel = R
        # The tokens of the chunk, and the state before it; without the factor `read`.
        a = (q @ z[..., :R].mT).tril() @ write + q @ S[..., :R, :]
        W = table.unflatten(2, (2, M)).transpose(2, 3).flatten(2)
        b = decayed(a, read) @ W.mT[:, None]
    # Multiply conj(b) by the conjugate of `read`, the power with which its token reads S.
    b = decayed(b, torch.stack((read[..., 0], -read[..., 1]), dim=-1))

    # The outputs from the tokens of the chunk and from S: [N, B, H, G, L, D] -> [B, T, H G, D]
    # without the zeros that were added.
    o = (b @ write.mT).tril() @ z[..., first_channel:] + b @ S[..., first_channel:, :].mT
    o = o.permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)[:, missing : missing + T]
    return o.to(v.dtype), multiply(leave, last).transpose(2, 3)
