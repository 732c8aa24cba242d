"""The kernels that the mixers call: the package's, or plain PyTorch.

Plain PyTorch computes in two cases: under torch.export, whose graphs run where these kernels are
not, and in an exported model if the package is not installed or has another interface.

The functions are those of `interdomain.features` and `interdomain.scan`, which describe the
arguments at length.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from interdomain.features.plain import features, step
from interdomain.scan.plain import is_exporting, plain_scan
from interdomain.scan.step import linear_one_step, scan_step

from .fixed_state_scan import plain_recurrence

INTERFACE = 1  # version of the package's functions that are called here
HAS_PACKAGE = False  # True if the package is installed, with this interface

# In an exported model the package may be missing, or be of another version.
try:
    import interdomain.features
    import interdomain.scan
    from interdomain.model.mixers import fla_kernels

    HAS_PACKAGE = interdomain.scan.INTERFACE == INTERFACE
    if not HAS_PACKAGE:
        logging.getLogger(__name__).warning(
            f"This code calls interface {INTERFACE} of the package interdomain, and the installed "
            f"one has {interdomain.scan.INTERFACE}: it computes in plain PyTorch. Install the "
            "version in config.json's `converted_by`, or convert again."
        )
except ImportError:
    pass

# Shapes: B batch, T tokens, Hq query heads, H heads of keys and state, R key features,
#         D value width, P width of z, M basis functions, E channels of a projection, W taps of the
#         convolution; for the baselines G heads of queries and keys, K key width, V value width.


def runs_package() -> bool:
    """Returns True if the package's kernels compute, and plain PyTorch does not."""
    return HAS_PACKAGE and not is_exporting()


def input_features(
    x: Tensor,
    head_dim: int,
    *,
    execution: Any = None,
    **options: Any,
) -> Tensor:
    """Applies convolution, RoPE, SiLU with l2 norm, and input norm, each if asked for.

    It is `interdomain.features.input_features` without the check of the documents' numbers.

    Args:
        x: A projection, [B, T, E].
        head_dim: R.
        execution: The layer's `Execution`. None means automatic choices.
        options: Any of conv (weight [E, 1, W], bias [E]), its `past` inputs [B, W - 1, E] and
            `documents` [B, T]; rope (cos, sin); silu (bool); norm (scale [R], shift [H, R]) and its
            eps. What is not given is left out.
    """
    if runs_package():
        backend = "auto" if execution is None else execution.features
        return interdomain.features.input_features(
            x,
            head_dim,
            backend=backend,
            check_documents=False,
            **options,
        )
    with torch.autocast(x.device.type, enabled=False):
        return features(x, head_dim, **_separate_tensors(**options))


def input_features_step(
    x: Tensor,
    head_dim: int,
    *,
    execution: Any = None,
    **options: Any,
) -> Tensor:
    """Applies `input_features` to one token of all projections. `past` is overwritten.

    Args:
        x: All projections of one token side by side, [B, E].
        head_dim: R.
        execution: The layer's `Execution`. None means automatic choices.
        options: Any of conv (weight [W, E'], bias [E']) of the first E' channels and their `past`
            inputs [B, W - 1, E'], which are overwritten; rope (cos, sin) of the first `rotated`
            heads; silu, the number of first heads that are mapped; norm (scale, shift), each [N,
            R], of the last N heads, and its eps.
    """
    if runs_package():
        backend = "auto" if execution is None else execution.features
        return interdomain.features.input_features_step(x, head_dim, backend=backend, **options)
    with torch.autocast(x.device.type, enabled=False):
        return step(x, head_dim, **_separate_tensors(**options))


def _separate_tensors(
    conv: Any = None,
    rope: Any = None,
    norm: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Names the tensors of each pair, for the functions of `features/plain.py`.

    Args:
        conv: (weight, bias) of the convolution. None for none.
        rope: (cos, sin) of the rotary angles. None for none.
        norm: (scale, shift) of the norm. None for none.
        options: Other options, which are passed on.
    """
    if conv is not None:
        options["weight"], options["bias"] = conv
    if rope is not None:
        options["cos"], options["sin"] = rope
    if norm is not None:
        options["scale"], options["shift"] = norm
    return options


def interdomain_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    mixing: Tensor,
    *,
    initial_state: Tensor | None = None,
    execution: Any = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Computes the recurrence and its query readout for all tokens (paper eqs. 11 and 13).

    Args:
        q: Query features, [B, T, Hq, R].
        k: Key features, [B, T, H, R].
        v: Values, [B, T, H, D].
        log_decay: log Lambda per token, [H, M, 2], as (real, imaginary).
        mixing: The matrices from state to readout, [H, 2M, 2M].
        initial_state: X before the first token, [B, H, M, R + D, 2]. None means zeros.
        execution: The layer's `Execution`. None means automatic choices.
        options: Any of documents, check_documents, final_state and group. Plain PyTorch ignores
            them.
    Returns:
        The output, [B, T, Hq, D] in v's dtype, and X after the last token, or None without
        `final_state`.
    """
    if runs_package():
        if execution is not None:
            options.update(backend=execution.backend, recompute=execution.recompute)
        return interdomain.scan.interdomain_scan(
            q,
            k,
            v,
            log_decay,
            mixing,
            initial_state=initial_state,
            **options,
        )
    with torch.autocast(k.device.type, enabled=False):
        return plain_scan(q, k, v, log_decay, mixing, initial_state)


def linear_scan(
    z: Tensor,
    log_decay: Tensor,
    readout: Tensor,
    *,
    initial_state: Tensor | None = None,
    execution: Any = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Computes the recurrence and its linear readout (S4D's) for all tokens.

    Args:
        z: Inputs, [B, T, H, P].
        log_decay: log Lambda per token, [H, M, 2], as (real, imaginary).
        readout: The weights of the readout, [H, 2M].
        initial_state: X before the first token, [B, H, M, P, 2]. None means zeros.
        execution: The layer's `Execution`. None means automatic choices.
        options: Any of documents, check_documents, final_state and group. Plain PyTorch ignores
            them.
    Returns:
        The output, [B, T, H, P] in z's dtype, and X after the last token, or None without
        `final_state`.
    """
    if runs_package():
        if execution is not None:
            options.update(backend=execution.backend)
        return interdomain.scan.linear_scan(
            z,
            log_decay,
            readout,
            initial_state=initial_state,
            **options,
        )
    with torch.autocast(z.device.type, enabled=False):
        return plain_scan(
            None,
            z,
            z[..., :0],
            log_decay,
            readout,
            initial_state,
        )


def interdomain_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    decay: Tensor,
    mixing: Tensor,
    state: Tensor,
) -> Tensor:
    """Computes one token of `interdomain_scan`, [B, Hq, D], and overwrites the state.

    Args:
        q: Query features of one token, [B, Hq, R].
        k: Its key features, [B, H, R].
        v: Its values, [B, H, D].
        log_decay: log Lambda per token, [H, M, 2], as (real, imaginary). Plain PyTorch ignores it.
        decay: Lambda itself, [H, M, 2], computed once for many steps.
        mixing: The matrices from state to readout, [H, 2M, 2M], or their upper half, [H, M, 2M].
        state: X before the token, [B, H, M, R + D, 2].
    """
    if runs_package():
        o, _ = interdomain.scan.interdomain_step(
            q,
            k,
            v,
            log_decay,
            mixing,
            state,
            decay=decay,
            inplace=True,
        )
        return o
    with torch.autocast(k.device.type, enabled=False):
        return scan_step(q, k, v, decay, mixing, state)


def linear_step(
    z: Tensor,
    *,
    log_decay: Tensor,
    decay: Tensor,
    readout: Tensor,
    state: Tensor,
) -> Tensor:
    """Computes one token of `linear_scan`, [B, H, P], and overwrites the state.

    Args:
        z: Inputs of one token, [B, H, P].
        log_decay: log Lambda per token, [H, M, 2], as (real, imaginary). Plain PyTorch ignores it.
        decay: Lambda itself, [H, M, 2], computed once for many steps.
        readout: The weights of the readout, [H, 2M].
        state: X before the token, [B, H, M, P, 2].
    """
    if runs_package():
        o, _ = interdomain.scan.linear_step(
            z,
            log_decay,
            readout,
            state,
            decay=decay,
            inplace=True,
        )
        return o
    with torch.autocast(z.device.type, enabled=False):
        return linear_one_step(z, decay, readout, state)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    documents: Tensor | None = None,
    lengths: Tensor | None = None,
    execution: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Computes a baseline's recurrence by `fla_kernels.recurrence` or `plain_recurrence`.

    Args:
        q: Queries, [B, T, G, K].
        k: Keys, [B, T, G, K].
        v: Values, [B, T, H, V].
        log_decay: At most 0, per head [B, T, H] or per channel of the keys [B, T, H, K]. None means
            no decay.
        beta: Step size of the delta rule, [B, T, H]. None means a recurrence without it.
        initial_state: S before the first token, [B, H, K, V]. None means zeros.
        documents: Each token's document, [B, T] integers that never fall along T. None means one
            document in each row.
        lengths: The number of tokens in each row, [B]; padding follows them, and the state returned
            is the one after the tokens. None means that no row has padding.
        execution: The layer's `Execution`. None means automatic choices.
        options: `cp_rank` and `beside` of `fla_kernels.recurrence`. Plain PyTorch ignores them.
    Returns:
        The output, [B, T, H, V] in v's dtype, and S after the last token.
    """
    if lengths is not None:
        # Padding adds nothing to the state, and the state does not decay over it.
        padding = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]  # [B, T]
        k = k.masked_fill(padding[:, :, None, None], 0)
        if log_decay is not None:
            trailing = [1] * (log_decay.ndim - 2)
            log_decay = log_decay.masked_fill(padding.view(*padding.shape, *trailing), 0)
    options.update(initial_state=initial_state, documents=documents)
    if runs_package():
        backend = "auto" if execution is None else execution.backend
        return fla_kernels.recurrence(
            q,
            k,
            v,
            log_decay,
            beta,
            backend=backend,
            **options,
        )
    return plain_recurrence(
        q,
        k,
        v,
        log_decay,
        beta,
        initial_state=initial_state,
        documents=documents,
    )
