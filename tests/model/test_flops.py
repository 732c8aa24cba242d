"""FLOPs against a count of the products that are really made, and memory against its own definition."""

import itertools

import pytest
import torch
from functorch.compile import aot_module, min_cut_rematerialization_partition, nop
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from interdomain import features
from interdomain.model import CONDITIONS, Transformer, build_config, count_parameters, meta_model, transformer
from interdomain.model.config import PRECISIONS
from interdomain.model.flops import forward_flops_per_token, memory_estimate, state_size, train_flops_per_token
from interdomain.model.interface import Mixer
from interdomain.model.mixer import CHUNK
from interdomain.scan import interdomain_scan, linear_scan

from .common import OPTIONS, VARIANTS, small_config


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_products_of_the_model(condition, option):
    """Linear layers, Fourier features and output head, counted by torch, for which the scan's op is nothing.

    Tables do not grow with T, so the difference of two lengths is free of them.
    """
    config = small_config(condition, **OPTIONS[option])
    T = 128
    with sdpa_kernel(SDPBackend.MATH):  # the form whose products torch counts
        model = Transformer(config)
        lengths = [counted(lambda t=t: model(torch.zeros(1, t, dtype=torch.int64))) for t in (T, 2 * T)]
    flops = forward_flops_per_token(config, T)
    softmax = condition == "softmax"
    # Beyond what grows with T^2 (softmax's scores and values, whole squares) ...
    square = (lengths[1] - 2 * lengths[0]) / (2 * T * T) if softmax else 0
    per_token = (lengths[1] - lengths[0]) / T - 3 * T * square
    assert per_token == flops["linear"] + flops["head"]
    if softmax:
        # ... of which the causal half, with its diagonal, is needed: (T + 1) / 2 keys per query.
        assert square == 2 * 2 * config.n_layers * config.dim
        assert flops["mixer"] == square * (T + 1) / 2


def chunk_of_the_query_readout(q, k, v, powers, mixing, X):
    """One chunk of one head, product by product; powers [2L + 1, M] of Lambda from -L to L, X [M, P] before the chunk."""
    L, R = q.shape
    M = X.shape[0]

    def pair(z):
        return torch.cat([z.real, z.imag], dim=-1)

    def spread(w, by):  # [L, 2M] real pairs times complex [L, M]
        z = torch.complex(w[:, :M], w[:, M:]) * by
        return pair(z)

    forth, back = powers[L + 1 :], powers[:L].flip(0)  # Lambda^1 .. Lambda^L; Lambda^-1 .. Lambda^-L
    scores = torch.tril(q @ k.T)  # L R
    a = spread(scores @ pair(back), forth)  # L 2M
    a = a + spread(q @ pair(X[:, :R].T), forth)  # R 2M
    b = a @ mixing.T  # 2M 2M
    read = torch.complex(b[:, :M], b[:, M:]) * forth
    signed = torch.cat([read.real, -read.imag], dim=-1)
    second = torch.tril(signed @ pair(back).T)  # 2M L
    o = second @ v  # L D
    o = o + signed @ torch.cat([X[:, R:].real, X[:, R:].imag])  # 2M D
    ahead = pair(powers[L : 2 * L].flip(0))  # Lambda^(L-1) .. Lambda^0
    grown = [ahead.T @ k, ahead.T @ v]  # 2M R, 2M D
    return o, [torch.complex(x[:M], x[M:]) for x in grown]


def chunk_of_the_linear_readout(z, powers, w, X):
    L, M = z.shape[0], X.shape[0]
    kernel = (w * powers[L : 2 * L]).sum(-1).real  # Re(w^T Lambda^tau): a table
    lag = torch.arange(L)[:, None] - torch.arange(L)
    y = torch.tril(kernel[lag.clamp_min(0)]) @ z  # L P
    read = w * powers[L + 1 :]
    y = y + torch.cat([read.real, -read.imag], dim=-1) @ torch.cat([X.real, X.imag])  # 2M P
    ahead = powers[L : 2 * L].flip(0)
    grown = torch.cat([ahead.real, ahead.imag], dim=-1).T @ z  # 2M P
    return y, torch.complex(grown[:M], grown[M:])


def per_head(M, L):
    torch.manual_seed(0)
    theta = torch.complex(-0.05 * torch.rand(M, dtype=torch.float64), torch.randn(M, dtype=torch.float64))
    powers = torch.exp(theta * torch.arange(-L, L + 1)[:, None])
    return theta, powers


@pytest.mark.parametrize("normalize", [False, True])
def test_core_of_the_query_readout(normalize):
    """The chunkwise algebra is written out once more, shown to be the scan's function, and its products are counted."""
    config = small_config("interdomain", normalize=normalize)
    L, R, D, M = CHUNK, config.head_dim, config.head_dim + normalize, config.mixer.n_basis
    theta, powers = per_head(M, L)
    q, k, v = (torch.randn(L, n, dtype=torch.float64) for n in (R, R, D))
    mixing = torch.randn(2 * M, 2 * M, dtype=torch.float64)
    X = torch.randn(M, R + D, dtype=torch.complex128)
    with FlopCounterMode(display=False) as counter:
        o, (grown_k, grown_v) = chunk_of_the_query_readout(q, k, v, powers, mixing, X)
    end = powers[-1][:, None] * X + torch.cat([grown_k, grown_v], dim=-1)
    wanted, state = interdomain_scan(
        *(x[None, :, None] for x in (q, k, v)),
        torch.view_as_real(theta)[None],
        mixing[None],
        initial_state=torch.view_as_real(X)[None, None],
        backend="reference",
    )
    torch.testing.assert_close(o, wanted[0, :, 0], rtol=1e-9, atol=1e-9)  # float64, powers up to e^3
    torch.testing.assert_close(torch.view_as_real(end), state[0, 0], rtol=1e-9, atol=1e-9)
    macs = counter.get_total_flops() / 2 / L
    ours = forward_flops_per_token(config, 10 * L)["mixer"] / 2 / config.n_layers / config.n_heads
    assert ours == macs
    # Passes 1, W and 2 of kernels/README.md.
    assert ours == L * R + 2 * L * 2 * M + L * D + 2 * 2 * M * (R + D) + 4 * M * M


def test_core_of_the_linear_readout():
    config = small_config("dual-linear")
    L, P, M = CHUNK, 2 * config.head_dim, config.mixer.n_basis
    theta, powers = per_head(M, L)
    z, w = torch.randn(L, P, dtype=torch.float64), torch.randn(M, dtype=torch.complex128)
    X = torch.randn(M, P, dtype=torch.complex128)
    with FlopCounterMode(display=False) as counter:
        y, grown = chunk_of_the_linear_readout(z, powers, w, X)
    wanted, state = linear_scan(
        z[None, :, None],
        torch.view_as_real(theta)[None],
        torch.cat([w.real, w.imag])[None],
        initial_state=torch.view_as_real(X)[None, None],
        backend="reference",
    )
    torch.testing.assert_close(y, wanted[0, :, 0], rtol=1e-9, atol=1e-9)
    end = powers[-1][:, None] * X + grown
    torch.testing.assert_close(torch.view_as_real(end), state[0, 0], rtol=1e-9, atol=1e-9)
    ours = forward_flops_per_token(config, 10 * L)["mixer"] / 2 / config.n_layers / config.n_heads
    assert ours == counter.get_total_flops() / 2 / L


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_states_are_as_large_as_said(condition, option):
    config = small_config(condition, **OPTIONS[option])
    (state, *_) = Transformer(config).init_state(3, 7).layers
    if config.mixer.kind == "softmax":
        assert sum(x.numel() for x in (state.k, state.v)) == 3 * 7 * state_size(config)
    else:
        assert state.ssm.numel() == 3 * state_size(config)


# Of one layer and token: multiply-adds of the core and of the convolutions; numbers of its state (the paper's budget at 1.3B).
TABLE = {
    "softmax": (4097 * 64 * 12, 0, 4096),
    "interdomain": (73_728 * 12, 2 * 4 * 768, 524_288),
    "single-query": (73_728 * 12, 3 * 4 * 768, 524_288),
    "dual-linear": (40_960 * 12, 4 * 768, 524_288),
    "s4d": (40_960 * 12, 2 * 4 * 768, 524_288),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_condition_has_its_own_count(condition):
    """About 74 k multiply-adds per token and head, against 262 k for causal softmax at T = 4096."""
    config, row = build_config("125M", condition), condition.removesuffix("-norope").removesuffix("-rope")
    flops = forward_flops_per_token(config, 4096)
    core, conv, state = TABLE[row]  # a rotation is not counted
    assert (flops["mixer"], flops["conv"]) == (2 * 12 * core, 2 * 12 * conv)
    assert state_size(build_config("1.3B", condition)) == state
    assert train_flops_per_token(config, 4096) == 3 * sum(flops.values())
    longer = forward_flops_per_token(config, 65_536)["mixer"]
    assert longer > 15 * flops["mixer"] if condition == "softmax" else longer == flops["mixer"]
    if condition == "interdomain":  # a shared state saves its updates only: 2M (R + D) per state head
        less = forward_flops_per_token(build_config("125M", condition, n_kv_heads=1), 4096)["mixer"]
        assert flops["mixer"] - less == 2 * 12 * 11 * 2 * 64 * 2 * 64


def test_an_unknown_mixer_takes_no_other_s_numbers(monkeypatch):
    config = build_config("debug")
    object.__setattr__(config.mixer, "kind", "linear-attention")
    for ask in (
        state_size,
        lambda c: forward_flops_per_token(c, 64),
        lambda c: estimate(c, n_params=10**6),
        Transformer,
    ):
        with pytest.raises(ValueError, match="'linear-attention': known are interdomain, softmax"):
            ask(config)
    # One that answers for nothing says so.
    monkeypatch.setitem(transformer.MIXER_CLASSES, "linear-attention", Mixer)
    for ask in (state_size, lambda c: forward_flops_per_token(c, 64), lambda c: estimate(c, n_params=10**6)):
        with pytest.raises(NotImplementedError, match="this mixer does not"):
            ask(config)


def estimate(config, **changes):
    settings = dict(shards=4, local_batch=8, seq_len=256, checkpointing="none", precision="bf16")
    settings |= {} if "n_params" in changes else {"n_params": count_parameters(meta_model(config))}
    return memory_estimate(config, **{**settings, **changes})


@pytest.mark.parametrize("condition", CONDITIONS)
def test_memory(condition):
    config = small_config(condition, n_layers=6)  # with two, a block that is computed again is half of all
    n = count_parameters(meta_model(config))
    found = estimate(config)
    # float32 parameters, gradients, and two moments, each on 1 of 4 devices.
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (n, n, 2 * n)

    some = estimate(config, replicated=n // 2, accumulated=True)
    on_each = n // 2 + (n - n // 2) // 4
    assert (some["parameters"], some["gradients"], some["optimizer"]) == (4 * on_each, 4 * on_each + 4 * n, 8 * on_each)
    assert estimate(config, shards=1, accumulated=True) == estimate(config, shards=1)  # nothing to gather

    def total(**changes):
        return sum(estimate(config, **changes).values())

    growing = [dict(local_batch=b) for b in (1, 2, 8)], [dict(seq_len=t) for t in (64, 256, 1024)]
    growing += ([dict(shards=s) for s in (8, 4, 1)],)
    growing += ([dict(checkpointing=c) for c in ("full", "selective", "none")], [dict(precision=p) for p in PRECISIONS])
    for changes in growing:
        for less, more in itertools.pairwise(total(**change) for change in changes):
            assert less < more
    kept = (
        2 * config.mixer.n_basis * config.n_heads * 6 * 8 * 256 * 2
        if "query" in condition or "interdomain" in condition
        else 0
    )
    for checkpointing, expected in (("none", kept), ("selective", kept), ("full", 0)):
        assert total(checkpointing=checkpointing, recompute=False) - total(checkpointing=checkpointing) == expected
    assert total() < sum(estimate(small_config(condition, n_layers=7)).values())
    assert total() < sum(estimate(small_config(condition, n_layers=6, vocab_size=200)).values())


@pytest.mark.parametrize("condition", CONDITIONS)
def test_memory_of_a_compiled_block(condition, monkeypatch):
    """Per token, what torch.compile's partitioner saves for the backward pass of a block whose features are one op."""
    config, graphs = build_config("125M", condition), []
    B, T = 2, 250  # no other size is a multiple of B T

    def forward_graph(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(features, "_choose", lambda *_: "triton")
    model = meta_model(config).to(torch.bfloat16).to_empty(device="cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        block = aot_module(
            model.layers["0"],
            fw_compiler=forward_graph,
            bw_compiler=nop,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        x = torch.empty(B, T, config.dim, dtype=torch.bfloat16, requires_grad=True)
        angles = torch.empty(T, 1, config.head_dim // 2)
        block(x, (angles, angles), model.dynamics()[0])
    saved = [node.meta["val"] for node in graphs[0].graph.output_node().args[0][1:] if node is not None]
    # By storage: softmax's output is saved twice, where a GPU's kernel lays it out by token.
    tokens = [t for t in saved if isinstance(t, torch.Tensor) and t.numel() % (B * T) == 0 and t.numel() > 64 * B * T]
    counted = sum(t.nbytes for t in tokens) - (2 * B * T * config.dim if condition == "softmax" else 0)
    one, two = (estimate(config, local_batch=n * B, seq_len=T, compiled=True)["activations"] for n in (1, 2))
    assert two - one == config.n_layers * counted
