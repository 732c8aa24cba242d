"""The scan by chunks in operations that autograd records: no complex numbers.

Every runtime of an exported graph has these operations. Exported models compute with it if the
package is not installed, and so does torch.export. On CPUs and GPUs the package has chunkwise.py,
which needs less memory in training.

Shapes: B batch, T tokens, H heads of state, G query heads of each, R key features, D value width,
P = R + D channels, M basis functions, L tokens of a chunk, N chunks. Complex vectors are pairs,
[..., M, 2] or [..., 2M].
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

    It is exported as one operation for any number of inputs, without gradients: those of a symbolic
    number of tokens cannot be translated to ONNX.

    Args:
        step: step(state, inputs[n]) -> (state, o).
        state: The first state.
        inputs: Tensors whose first axis is n.

    Returns:
        The last state, and all o, stacked.
    """
    if is_exporting():
        from torch._higher_order_ops import scan  # late: it is slow to import

        return scan(step, state.detach(), [x.detach() for x in inputs])
    outputs = []
    for each in zip(*inputs, strict=True):
        state, o = step(state, each)
        outputs.append(o)
    return state, torch.stack(outputs)


def plain_scan(
    q: Tensor | None, k: Tensor, v: Tensor, theta: Tensor, table: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes all tokens by chunks of L.

    A chunk starts with S = Lambda^h X, h = L / 2. Its token i reads Lambda^(i + 1 - h) (S + sum_j
    Lambda^(h - 1 - j) z_j) of all tokens j up to its own: no power leaves the range of float32.

    Args:
        q: [B, T, H G, R], or None for the linear readout.
        k: [B, T, H, R].
        v: [B, T, H, D].
        theta: log Lambda, [H, M, 2].
        table: W [H, 2M, 2M], or w [H, 2M] for the linear readout.
        state: [B, H, M, P, 2], or None for zeros.

    Returns:
        o [B, T, H G, D], or [B, T, H, P] for the linear readout; and the state after the last
        token.
    """
    (B, T, H, R), M = k.shape, theta.shape[1]
    L = 1 if T == 1 else CHUNK
    N, h, i = (T + L - 1) // L, L // 2, torch.arange(L, device=k.device)
    missing = N * L - T
    # A chunk of zeros behind an exported graph's tokens: one chunk alone would make N a constant of
    # that graph.
    more = int(is_exporting() and T > 1)

    def chunked(x: Tensor) -> Tensor:  # [B, T, H G, C] -> [N, B, H, G, L, C], zeros in front
        x = F.pad(x.to(theta.dtype), (0, 0, 0, 0, missing, more * L)).unflatten(2, (H, -1))
        return x.unflatten(1, (N + more, L)).permute(1, 0, 3, 4, 2, 5)

    def decayed(x: Tensor, read: Tensor) -> Tensor:
        return multiply(read, x.unflatten(-1, (M, 2))).flatten(-2)

    # Powers for reading, writing and keeping, and for the state at the ends of a chunk.
    read = powers(theta, i + 1 - h)[:, None]  # [H, 1, L, M, 2]
    written, kept = (
        powers(theta, j).flatten(2)[:, None] for j in (h - 1 - i, L + h - 1 - i)
    )  # [H, 1, L, 2M]
    enter, passed, leave = (powers(theta, i[:1] + n) for n in (h - missing, L, -h))  # [H, 1, M, 2]

    # The state before every chunk.
    z = chunked(torch.cat((k, v), dim=-1))
    sums = (z.mT @ kept).squeeze(3).unflatten(-1, (M, 2))  # [N, B, H, P, M, 2]
    state = theta.new_zeros(B, H, M, z.shape[-1], 2) if state is None else state
    start, each = multiply(enter, state.transpose(2, 3)), passed.expand(N + more, *passed.shape)
    last, S = in_order(
        lambda S, chunk: (multiply(chunk[0], S) + chunk[1], S.clone()), start, [each, sums]
    )
    last = S[-1] if more else last
    S = S.flatten(-2)[:, :, :, None]  # [N, B, H, 1, P, 2M]

    # The conjugate of b, for a real part is the product of pairs with conjugates; of (real parts |
    # imaginary parts), pairs.
    table = torch.stack((table[:, :M], -table[:, M:]), dim=2).flatten(1, 2)
    if q is None:
        b, first = table[:, None, None], 0  # channels from `first` on are read
    else:
        q, first = chunked(q), R
        a = (q @ z[..., :R].mT).tril() @ written + q @ S[..., :R, :]
        W = table.unflatten(2, (2, M)).transpose(2, 3).flatten(2)
        b = decayed(a, read) @ W.mT[:, None]
    # The outputs, without the tokens that were added.
    b = decayed(b, torch.stack((read[..., 0], -read[..., 1]), dim=-1))
    o = (b @ written.mT).tril() @ z[..., first:] + b @ S[..., first:, :].mT
    o = o.permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)[:, missing : missing + T]
    return o.to(v.dtype), multiply(leave, last).transpose(2, 3)
