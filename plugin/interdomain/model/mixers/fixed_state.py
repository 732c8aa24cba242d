"""Baselines with a state of fixed size: gated linear attention, Mamba-2, DeltaNet and gated DeltaNet.

Each is a layer around `recurrence`, after its paper and its authors' implementation (flash-linear-attention, mamba). With the
default heads all have as many numbers of state as interdomain attention (`config.state_shape`). None rotates queries or keys.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from interdomain.scan.tables import CHUNK

from ..config import Execution, ModelConfig
from ..feature_maps import KeptInFloat32, widened
from ..layers import Linear, LocalParameters, RMSNorm, ShortConv
from ..settings import state_shape
from ..shard import shard_of
from ..state import MixerState
from .base import Packing, Recurrence, last_inputs
from .fixed_state_scan import l2_normed
from .kernels import input_features, recurrence
from .ssm import copied

# Shapes: B batch, T time, H heads of the state, G heads of queries and keys, K key width, V value width, W convolution width,
#         E channels of the convolution.

LOW_RANK = 16  # of gated linear attention's gate, which is also divided by as many (Yang et al., 2024, section 4.4)


class StepSize(KeptInFloat32):
    """The decay exp(A softplus(x + dt_bias)) per head, A = -exp(A_log), and of Mamba-2 the skip D. Called, it returns (A_log,
    dt_bias, D or nothing) as copies, as SSMDynamics does."""

    def __init__(self, n_heads: int, *, skip: bool) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(n_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(n_heads, dtype=torch.float32))
        if skip:
            self.D = nn.Parameter(torch.empty(n_heads, dtype=torch.float32))

    def forward(self) -> tuple[Tensor, ...]:
        self.check_float32()
        return tuple(copied(parameter) for parameter in self.parameters())


class FixedStateMixer(Recurrence):
    """Queries, keys and values, a causal convolution with SiLU over all of them, the recurrence, a norm and an output gate.

    Attributes: what a kind has: conv_bias; always_silu, without a convolution, too; gated, the output; delta, beta;
        shared_keys, one head of them for all.
    """

    conv_bias = False
    always_silu = True
    gated = True
    delta = False
    shared_keys = False

    def __init__(self, config: ModelConfig, execution: "Execution | None" = None) -> None:
        super().__init__()
        self.config = config.mixer
        self.layer = config
        self.execution = execution
        self.shape = state_shape(config.mixer, config.dim)
        dim = config.dim
        keys, values = self._widths(config)
        self.widths = keys, keys, values
        self.wq = Linear(dim, keys)
        self.wk = Linear(dim, keys)
        self.wv = Linear(dim, values)
        self.wq.whole = self.shared_keys
        self.wk.whole = self.shared_keys
        taps = config.mixer.conv_width
        self.conv = ShortConv(sum(self.widths), taps, self.conv_bias) if taps else None
        self.ssm: StepSize | None = None
        self._make_gates(dim)
        self.wb = Linear(dim, self.shape.heads) if self.delta else None
        self.wg = Linear(dim, values) if self.gated else None
        self.norm = RMSNorm(self.norm_width, eps=config.norm_eps)
        self.wo = Linear(values, dim)

    @property
    def norm_width(self) -> int:
        return self.shape.value_width

    def _make_gates(self, dim: int) -> None:
        """The parameters of the decay."""

    def _core(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, dynamics: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, dim], q and k [B, T, G, K], v [B, T, H, V] -> (o [B, T, H, V], the state after the last token)."""
        raise NotImplementedError

    def _gate(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """The norm of each head's output [B, T, H, V], times SiLU of the gate [B, T, H V]: [B, T, H V]."""
        # PyTorch's norm is one kernel where both are of one dtype.
        o = self.norm(o.to(self.norm.weight.dtype)).flatten(2)
        return o if gate is None else o * F.silu(gate)

    def forward(
        self,
        x: Tensor,
        rope: Any = None,
        dynamics: tuple[Tensor, ...] | None = None,
        state: MixerState | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; with a state, continues from it and advances it past the last token."""
        documents, back, lengths = packing or Packing()
        conv_past = self.config.conv_past
        tail = None
        if self.shard is not None and self.conv is not None:
            tail = self.shard.send_tail(x, conv_past)

        # Queries, keys and values side by side through the convolution and SiLU.
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        widths = [q.shape[-1], k.shape[-1], v.shape[-1]]
        y = torch.cat([q, k, v], dim=-1)
        conv_inputs = None
        if self.conv is not None:
            past = None
            if state is not None:
                past = state.conv.to(y.dtype)
                conv_inputs = last_inputs(state.conv, y, conv_past, lengths)
            if self.shard is not None and tail is not None:
                hidden = self.shard.receive_tail(tail, x, back)
                past = torch.cat([self.wq(hidden), self.wk(hidden), self.wv(hidden)], dim=-1)
            y = self._convolved(y, past, documents)
        if self.always_silu or self.conv is not None:
            y = F.silu(y)
        q, k, v = y.split(widths, dim=-1)
        q = q.unflatten(-1, (-1, self.shape.key_width))
        k = k.unflatten(-1, (-1, self.shape.key_width))
        v = v.unflatten(-1, (-1, self.shape.value_width))

        # Ranks with shards of the sequences compute the gate while they exchange their states.
        gate = None

        def make_gate() -> None:
            nonlocal gate
            gate = None if self.wg is None else self.wg(x)

        options = dict(documents=documents, lengths=lengths, shard=self.shard, beside=make_gate)
        dynamics = self.dynamics([self])[0] if dynamics is None else dynamics
        o, S = self._core(
            x, q, k, v, dynamics, initial_state=None if state is None else state.ssm, **options
        )
        if self.shard is None:
            make_gate()
        if state is not None:
            state.advance(state.conv if conv_inputs is None else conv_inputs, S)
        return self.wo(self._gate(o, gate))

    def _convolved(self, y: Tensor, past: Tensor | None, documents: Tensor | None) -> Tensor:
        """The convolution of y [B, T, E] after `past` [B, W - 1, E]."""
        assert self.conv is not None
        weight, bias = self.conv()
        weight = self._this_ranks(weight)
        bias = weight.new_zeros(len(weight)) if bias is None else self._this_ranks(bias)
        convolved = input_features(
            y,
            math.gcd(y.shape[2], 64),  # heads are nothing to a convolution
            conv=(weight, bias),
            past=past,
            documents=documents,
            execution=self.execution,
        )
        return convolved.flatten(2)

    def _this_ranks(self, x: Tensor) -> Tensor:
        """The part of x [E, ...] that is of the channels which this rank has of queries, keys and values."""
        if self.heads is None:
            return x
        q, k, v = x.split(self.widths)
        if not self.shared_keys:
            q = shard_of(q, self.heads)
            k = shard_of(k, self.heads)
        return torch.cat([q, k, shard_of(v, self.heads)])

    @staticmethod
    def dynamics(
        mixers: "list[FixedStateMixer]", dtype: torch.dtype = torch.float32
    ) -> list[tuple[Tensor, ...]]:
        """The result of `StepSize` for each mixer, of its heads."""
        by_layer = []
        for mixer in mixers:
            local = []
            for parameter in () if mixer.ssm is None else mixer.ssm():
                exact = parameter.to(torch.promote_types(parameter.dtype, dtype))
                local.append(shard_of(exact, mixer.heads))
            by_layer.append(tuple(local))
        return by_layer

    def init_state(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        dynamics: Any = (),
    ) -> MixerState:
        shapes = self.state_shapes(self.layer)
        conv = torch.zeros(batch, *shapes["conv"], dtype=dtype, device=device)
        exact = torch.promote_types(dtype, torch.float32)
        return MixerState(conv, torch.zeros(batch, *shapes["ssm"], dtype=exact, device=device))

    @classmethod
    def state_shapes(cls, config: ModelConfig, ranks: int = 1) -> dict[str, tuple[int, ...]]:
        keys, values = cls._widths(config)
        channels = 2 * keys // (1 if cls.shared_keys else ranks) + values // ranks
        heads, *matrix = state_shape(config.mixer, config.dim)
        return {"conv": (config.mixer.conv_past, channels), "ssm": (heads // ranks, *matrix)}

    # Costs

    @classmethod
    def _widths(cls, config: ModelConfig) -> tuple[int, int]:
        """Widths of the queries, which keys have too, and of the values."""
        H, K, V = state_shape(config.mixer, config.dim)
        return (1 if cls.shared_keys else H) * K, H * V

    @classmethod
    def macs(cls, config: ModelConfig, seq_len: int) -> dict[str, int]:
        """The core as `recurrence` has it by chunks; a triangular system takes half a product."""
        H, K, V = state_shape(config.mixer, config.dim)
        (keys, _), L = cls._widths(config), min(CHUNK, seq_len)
        core = L * keys + H * (
            L * V + 2 * K * V
        )  # scores; within the chunk; reading the state and adding to it
        if cls.delta:
            core += L * keys + H * (
                L * (K + V) // 2 + K * V
            )  # scores of keys; the system; its part of the state
        return {"mixer": core}

    @classmethod
    def kept(cls, config: ModelConfig) -> tuple[int, int]:
        """The numbers with flash-linear-attention's kernels: inputs of convolution, SiLU and recurrence; of the norm, the gate
        (its SiLU, the product) and the last matrix; float32 copies of normalised queries and keys, and of a gate per channel.
        In plain PyTorch autograd keeps more, mostly the states between chunks."""
        keys, values = cls._widths(config)
        conv = bool(config.mixer.conv_width)
        token = (1 + conv + (cls.always_silu or conv)) * (2 * keys + values) + (
            2 + 3 * cls.gated
        ) * values
        token += 8 * keys * cls.delta + 6 * keys * (config.mixer.kind == "gla")
        return token, 0

    @classmethod
    def received(cls, config: ModelConfig, context: int, tensor: int) -> tuple[int, int]:
        """Two all-to-alls: of A and B, and of the states, of the N-th part of the rows (`fla_kernels`)."""
        H, K, V = state_shape(config.mixer, config.dim)
        rows, width, D = (H // tensor, K, K) if cls.delta else (H // tensor * K, 1, 1)
        return (context - 1) * -(-rows // context) * width * (2 * V + D), 0


class GLAMixer(LocalParameters, FixedStateMixer):
    """Gated linear attention: a decay per channel of the keys, log_decay = log sigmoid(W2 W1 x + b) / 16 (Yang et al., 2024,
    section 4.4: https://arxiv.org/abs/2312.06635). Without a convolution, its default, it has no SiLU."""

    always_silu = False

    def _make_gates(self, dim: int) -> None:
        self.gate_down = Linear(dim, LOW_RANK)
        self.gate_up = Linear(LOW_RANK, self.widths[0])
        self.gate_bias = nn.Parameter(torch.empty(self.widths[0]))

    def _core(self, x, q, k, v, dynamics, **options):
        gate = widened(self.gate_up(self.gate_down(x))) + self.local("gate_bias")
        decay = F.logsigmoid(shard_of(gate, self.heads, -1)) / LOW_RANK
        return self.call_core(
            recurrence,
            q * q.shape[-1] ** -0.5,
            k,
            v,
            decay.unflatten(-1, (-1, k.shape[-1])),
            **options,
        )


class DeltaNetMixer(FixedStateMixer):
    """The delta rule: l2-normalised queries and keys, beta = sigmoid(Wb x) (Yang et al., 2024, eq. 5 and section 3.4:
    https://arxiv.org/abs/2406.06484); no decay, no output gate."""

    gated = False
    delta = True

    def _core(self, x, q, k, v, dynamics, **options):
        assert self.wb is not None
        q = l2_normed(widened(q)).to(v.dtype)
        k = l2_normed(widened(k)).to(v.dtype)
        beta = torch.sigmoid(widened(shard_of(self.wb(x), self.heads, -1)))
        return self.call_core(
            recurrence, q * q.shape[-1] ** -0.5, k, v, self._decay(x, dynamics), beta, **options
        )

    def _decay(self, x: Tensor, dynamics: tuple[Tensor, ...]) -> Tensor | None:
        return None


class GatedDeltaNetMixer(DeltaNetMixer):
    """DeltaNet with an output gate and a decay per head, log_decay = A softplus(Wa x + dt_bias), Mamba-2's (Yang et al., 2025,
    eq. 10 and section 3.4: https://arxiv.org/abs/2412.06464)."""

    gated = True

    def _make_gates(self, dim: int) -> None:
        self.wa = Linear(dim, self.shape.heads)
        self.ssm = StepSize(self.shape.heads, skip=False)

    def _decay(self, x: Tensor, dynamics: tuple[Tensor, ...]) -> Tensor:
        A_log, dt_bias = dynamics
        return -A_log.exp() * F.softplus(widened(shard_of(self.wa(x), self.heads, -1)) + dt_bias)


class Mamba2Mixer(FixedStateMixer):
    """Mamba-2 by its duality with attention: q is C, k is B (one head for all), v is dt x, log_decay = A dt,
    dt = softplus(Wa x + dt_bias), and D x is added (Dao & Gu, 2024, section 7: https://arxiv.org/abs/2405.21060). The gate
    comes before the norm, which is over all heads."""

    conv_bias = True
    shared_keys = True

    @property
    def norm_width(self) -> int:
        return self.shape.heads * self.shape.value_width

    def _make_gates(self, dim: int) -> None:
        self.wa = Linear(dim, self.shape.heads)
        self.ssm = StepSize(self.shape.heads, skip=True)

    def _core(self, x, q, k, v, dynamics, **options):
        A_log, dt_bias, D = dynamics
        dt = F.softplus(widened(shard_of(self.wa(x), self.heads, -1)) + dt_bias)
        o, S = self.call_core(
            recurrence, q, k, (v * dt[..., None]).to(v.dtype), -A_log.exp() * dt, **options
        )
        return (o + D[:, None] * v).to(v.dtype), S

    def _gate(self, o: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        y = (o.flatten(2) * F.silu(gate)).to(self.norm.weight.dtype)
        if self.heads is None:
            return self.norm(y)
        squares = widened(y).square().sum(-1, keepdim=True)
        mean = self.heads.gather(squares).sum(0) / self.norm_width
        weight = shard_of(self.norm.local(), self.heads)
        return (widened(y) * (mean + self.layer.norm_eps).rsqrt() * weight).to(y.dtype)


MIXERS: dict[str, type[FixedStateMixer]] = {
    "gla": GLAMixer,
    "mamba2": Mamba2Mixer,
    "deltanet": DeltaNetMixer,
    "gated-deltanet": GatedDeltaNetMixer,
}
