"""The recurrence of the fixed-state baselines by flash-linear-attention's kernels.

The extra `fla` installs them. The recurrence is one `torch.library` op, and one for its backward
pass:

    torch.ops.interdomain.fla_recurrence.default
    torch.ops.interdomain.fla_recurrence_backward.default

torch.compile does not trace that package's kernels, and activation checkpointing knows what it
saves by an op's name. Only the inputs are saved: the backward pass computes the forward pass once
more. None of this has run on a GPU yet.

Under context parallelism the ranks exchange the states between their parts of the sequences.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from interdomain.scan.library import log_once, tag_caches

from ..parallel import GroupRank, receive, send
from .fixed_state_scan import first_tokens, plain_recurrence

# Shapes: B batch, T tokens (on this rank), H heads, G heads of queries and keys, K key width,
#         V value width, D = K for a decay per channel, 1 per head, N context-parallel ranks.

INSTALLED = importlib.util.find_spec("fla") is not None  # not in `chosen`: torch.compile traces it
# Values of `mixer.backend`, the scan's setting, that ask for plain PyTorch here, too.
PLAIN = ("chunkwise-torch", "reference")


def chosen(
    device: torch.device | None,
    dtype: torch.dtype,
    backend: str,
) -> tuple[bool, str]:
    """Decides if flash-linear-attention's kernels compute.

    Args:
        device: The device of the inputs. None means a GPU of another machine.
        dtype: The dtype of the values.
        backend: `mixer.backend`.
    Returns:
        True if the kernels compute, and a description of what computes.
    """
    if backend in PLAIN:
        reason = "as set"
    elif device is not None and device.type != "cuda":
        reason = f"the input is on {device.type}"
    elif dtype not in (torch.bfloat16, torch.float16):
        reason = f"the input is {dtype}, and those kernels compute in half precision only"
    elif device is not None and not INSTALLED:
        reason = "flash-linear-attention is not installed"
    elif not INSTALLED:
        return True, "flash-linear-attention (kernels), if it is installed there"
    else:
        return True, "flash-linear-attention (kernels)"
    description = f"chunkwise-torch (plain PyTorch): {reason}"
    if device is not None:
        log_once(f"interdomain.model: the recurrence is {description}")
    return False, description


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    documents: Tensor | None = None,
    backend: str = "auto",
    cp_rank: GroupRank | None = None,
    beside: Callable[[], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `plain_recurrence`, by flash-linear-attention's kernels if they can (`chosen`).

    Args:
        q: Queries, [B, T, G, K].
        k: Keys, [B, T, G, K].
        v: Values, [B, T, H, V].
        log_decay: At most 0, per head [B, T, H] or per channel of the keys [B, T, H, K]. None means
            no decay.
        beta: Step size of the delta rule, [B, T, H]. None means a recurrence without it.
        initial_state: S before the first token, [B, H, K, V], float32 or float64. None means zeros.
        documents: Each token's document, [B, T] integers that never fall along T. None means one
            document in each row.
        backend: The setting `mixer.backend`.
        cp_rank: This rank's place in context parallelism. There is no `initial_state` then.
        beside: Under context parallelism, a function that is called while the ranks exchange their
            states.
    """
    if cp_rank is not None:
        assert beside is not None
        return _context_parallel(
            backend,
            q,
            k,
            v,
            log_decay,
            beta,
            documents,
            cp_rank,
            beside,
        )
    if v.shape[1] == 1 or not chosen(v.device, v.dtype, backend)[0]:
        return plain_recurrence(
            q,
            k,
            v,
            log_decay,
            beta,
            initial_state=initial_state,
            documents=documents,
        )
    if initial_state is None:
        shape = v.shape[0], v.shape[2], k.shape[3], v.shape[3]
        initial_state = v.new_zeros(shape, dtype=torch.promote_types(v.dtype, torch.float32))
    with torch.autocast(v.device.type, enabled=False):
        return fla_recurrence(
            q,
            k,
            v,
            log_decay,
            beta,
            initial_state,
            documents,
        )


def _context_parallel(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    documents: Tensor | None,
    cp_rank: GroupRank,
    beside: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """Computes `recurrence` for the tokens of a context-parallel rank. Collective.

    Document 0 continues from the previous rank. The recurrence over a rank's tokens is affine in
    the state S before them. The state after them is A S + B, and C_t S is added to the output that
    a state of zeros gives. A is a decay per channel, or a K x K matrix for the delta rules. A and B
    have the same size for every T.

    The rows of S that do not mix, (h, k) of a decay or heads of the delta rules, are divided among
    the ranks. One all-to-all gives each rank its rows of every A and B. It computes the states of
    those rows before each rank's tokens, and a second all-to-all sends the states to their ranks.

    Args:
        backend: The setting `mixer.backend`.
        q: Queries, [B, T, G, K].
        k: Keys, [B, T, G, K].
        v: Values, [B, T, H, V].
        log_decay: At most 0, per head [B, T, H] or per channel of the keys [B, T, H, K]. None means
            no decay.
        beta: Step size of the delta rule, [B, T, H]. None means a recurrence without it.
        documents: Each token's document, [B, T] integers that never fall along T. None means one
            document in each row.
        cp_rank: This rank's place in context parallelism.
        beside: Called while the ranks exchange A and B.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    K = k.shape[-1]
    V = v.shape[-1]

    # This rank's tokens with a state of zeros before them give o and B. A and C come beside.
    if beta is not None:
        # Columns of a state do not mix. K more columns, which start as the identity and to which
        # nothing is added, become A, and their outputs are C.
        identity = torch.eye(K, dtype=dtype, device=v.device).expand(v.shape[0], v.shape[2], -1, -1)
        o, S = recurrence(
            q,
            k,
            F.pad(v, (0, K)),
            log_decay,
            beta,
            initial_state=F.pad(identity, (V, 0)),
            documents=documents,
            backend=backend,
        )
        o, C = o.split([V, K], dim=-1)
        B, A = S.split([V, K], dim=-1)
    else:
        assert log_decay is not None
        o, B = recurrence(
            q,
            k,
            v,
            log_decay,
            documents=documents,
            backend=backend,
        )
        decay = log_decay.to(dtype).view(*v.shape[:3], -1)  # [B, T, H, D]
        if documents is not None:
            decay = decay.masked_fill(first_tokens(documents)[..., None, None], -torch.inf)
        from_start = decay.cumsum(1).exp()
        C = q * from_start
        A = from_start[:, -1, :, :, None].expand(-1, -1, K, -1)

    # [B, H, K, V + D] -> rows that do not mix, [H, B, K, V + D] or [H K, B, 1, V + 1].
    batch, H = B.shape[:2]
    D = A.shape[-1]
    rows = torch.cat([B, A], dim=-1).transpose(0, 1)
    if D == 1:
        rows = rows.transpose(1, 2).reshape(H * K, batch, 1, V + 1)
    n_rows, _, width, _ = rows.shape

    # Every rank gets the same number of rows, the last ones padded with zeros.
    rows_per_rank = -(-n_rows // cp_rank.size)  # rounded up
    counts = [rows_per_rank] * cp_rank.size
    padded = F.pad(rows.flatten(1), (0, 0, 0, rows_per_rank * cp_rank.size - n_rows))
    sent = send(padded, counts, counts, cp_rank)
    beside()
    with torch.autocast(v.device.type, enabled=False):
        all_ranks = receive(sent, counts, counts, cp_rank)  # [N * rows, ...]
        before = _states_before(all_ranks.view(cp_rank.size, -1, batch, width, V + D), V)
        sent = send(before.flatten(0, 1).flatten(1), counts, counts, cp_rank)
        S = receive(sent, counts, counts, cp_rank)[:n_rows].view(n_rows, batch, width, V)
        if D == 1:
            S = S.view(H, K, batch, V).permute(2, 0, 1, 3)
        else:
            S = S.transpose(0, 1)  # [B, H, K, V]
        read = C.to(dtype).transpose(1, 2) @ S  # [B, H, T, V]
        o = o + read.transpose(1, 2)
        return o.to(v.dtype), B + _apply(A, S)


def _states_before(rows: Tensor, V: int) -> Tensor:
    """Computes the states before each rank's tokens, [N, rows, B, K, V].

    Args:
        rows: B and A of each rank's tokens, side by side, [N, rows, B, K, V + D].
        V: The value width. The other columns are A.
    """
    B, A = rows.split([V, rows.shape[-1] - V], dim=-1)
    # A prefix sum by doubling: (A, B) of all ranks up to each.
    step = 1
    while step < len(B):
        B = torch.cat([B[:step], B[step:] + _apply(A[step:], B[:-step])])
        A = torch.cat([A[:step], _apply(A[step:], A[:-step])])
        step *= 2
    return torch.cat([torch.zeros_like(B[:1]), B[:-1]])


def _apply(A: Tensor, S: Tensor) -> Tensor:
    """Applies A, [..., K, 1] or [..., K, K], to a state or to another A, [..., K, n].

    Args:
        A: The decays, or the matrices.
        S: What they are applied to.
    """
    if A.shape[-1] == 1:
        return A * S
    return A @ S


# The op around flash-linear-attention's kernels.


@torch.library.custom_op("interdomain::fla_recurrence", mutates_args=())
def fla_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes `plain_recurrence` with an initial state.

    Args:
        q: Queries, [B, T, G, K].
        k: Keys, [B, T, G, K].
        v: Values, [B, T, H, V].
        log_decay: At most 0, per head [B, T, H] or per channel of the keys [B, T, H, K]. None means
            no decay.
        beta: Step size of the delta rule, [B, T, H]. None means a recurrence without it.
        state: S before the first token, [B, H, K, V], float32.
        documents: Each token's document, [B, T] integers that never fall along T. None means one
            document in each row.
    """
    return _run(q, k, v, log_decay, beta, state, documents)


@fla_recurrence.register_fake
def _(q, k, v, log_decay, beta, state, documents):
    return v.new_empty(v.shape), state.new_empty(state.shape)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Any,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Calls the package's kernel. It wants one dtype, and as many heads of keys as of values.

    Args:
        q: Queries, [B, T, G, K].
        k: Keys, [B, T, G, K].
        v: Values, [B, T, H, V].
        log_decay: At most 0, per head [B, T, H] or per channel of the keys [B, T, H, K]. None means
            no decay.
        beta: Step size of the delta rule, [B, T, H]. None means a recurrence without it.
        state: S before the first token, [B, H, K, V], float32.
        documents: Each token's document, [B, T] integers that never fall along T. None means one
            document in each row.
    """
    rows = len(v)
    q = q.to(v.dtype).expand(-1, -1, v.shape[2], -1)
    k = k.to(v.dtype).expand(-1, -1, v.shape[2], -1)
    tensors = [q, k, v]
    if log_decay is not None:
        tensors.append(log_decay.float())
    if beta is not None:
        tensors.append(beta.to(v.dtype))
    kernel = _kernel(None if log_decay is None else log_decay.ndim == 4, beta is not None)
    options: dict[str, Any] = dict(scale=1.0, output_final_state=True)
    if documents is None:
        return kernel(*tensors, initial_state=state, **options)

    # Packed documents: all rows' documents one after the other as one row. A document that
    # continues from before its row starts with the row's state, all others with zeros.
    first = first_tokens(documents)
    first[:, 0] = True
    starts = first.flatten().nonzero()[:, 0]
    last_of_row = first.sum(1).cumsum(0) - 1  # the index of each row's last document, [B]
    first_of_row = last_of_row - first.sum(1) + 1
    continues = (documents[:, 0] == 0)[:, None, None, None]
    before = state.new_zeros(len(starts), *state.shape[1:])
    before = before.index_put((first_of_row,), state.where(continues, 0))
    ends = F.pad(starts, (0, 1), value=first.numel())
    tensors = [x.flatten(0, 1)[None] for x in tensors]
    o, final_states = kernel(*tensors, initial_state=before, cu_seqlens=ends, **options)
    return o.unflatten(1, (rows, -1))[0], final_states[last_of_row]


def _kernel(per_channel: bool | None, delta: bool) -> Any:
    """Returns the package's function of q, k, v, then the decay and beta if there are any.

    Args:
        per_channel: True for a decay per channel, False for one per head, None for no decay.
        delta: True for the delta rule.
    """
    if delta:
        name = "delta_rule" if per_channel is None else "gated_delta_rule"
    else:
        name = "gla" if per_channel else "simple_gla"
    return getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")


@torch.library.custom_op("interdomain::fla_recurrence_backward", mutates_args=())
def recurrence_backward(
    d_o: Tensor,
    d_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    documents: Tensor | None,
) -> list[Tensor]:
    """Returns the gradients of q, k, v, log_decay, beta and state, without those that are None.

    Args:
        d_o: Gradient of the output, [B, T, H, V].
        d_state: Gradient of the final state, [B, H, K, V].
        q: Queries, [B, T, G, K].
        k: Keys, [B, T, G, K].
        v: Values, [B, T, H, V].
        log_decay: At most 0, per head [B, T, H] or per channel of the keys [B, T, H, K]. None means
            no decay.
        beta: Step size of the delta rule, [B, T, H]. None means a recurrence without it.
        state: S before the first token, [B, H, K, V], float32.
        documents: Each token's document, [B, T] integers that never fall along T. None means one
            document in each row.
    """
    inputs = []
    for x in (q, k, v, log_decay, beta, state):
        inputs.append(None if x is None else x.detach().requires_grad_())
    # Within an op autograd is off: compute the forward pass again with it.
    without: Any = torch._C._SetExcludeDispatchKeyGuard
    with torch.enable_grad(), without(torch._C.DispatchKey.AutogradFunctionality, False):
        outputs = _run(*inputs, documents)  # pyright: ignore[reportArgumentType, reportCallIssue]
    present = [x for x in inputs if x is not None]
    gradients = torch.autograd.grad(
        outputs,
        present,
        (d_o, d_state),
        allow_unused=True,
        materialize_grads=True,
    )
    return [gradient.clone() for gradient in gradients]


@recurrence_backward.register_fake
def _(d_o, d_state, q, k, v, log_decay, beta, state, documents):
    return [x.new_empty(x.shape) for x in (q, k, v, log_decay, beta, state) if x is not None]


def _setup(ctx, inputs, output):
    """Saves the op's inputs for the backward pass."""
    ctx.save_for_backward(*inputs)


def _gradient(ctx, d_o, d_state):
    """Returns the gradients of all inputs, given those of the output and the final state."""
    inputs = ctx.saved_tensors
    gradients = iter(recurrence_backward(d_o.contiguous(), d_state.contiguous(), *inputs))
    # `documents`, the last input, has no gradient.
    return *[None if x is None else next(gradients) for x in inputs[:-1]], None


fla_recurrence.register_autograd(_gradient, setup_context=_setup)
tag_caches(__name__)
