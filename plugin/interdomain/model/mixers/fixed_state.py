"""Baselines of fixed state: gated linear attention, Mamba-2, DeltaNet and gated DeltaNet.

Each is a layer around `recurrence`, after its paper and its authors' implementation
(flash-linear-attention, mamba). With the default heads all have as many numbers of state as
interdomain attention (`settings.state_shape`). None rotates queries or keys.
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
from ..parallel import local_slice
from ..settings import state_shape
from ..state import MixerState
from .base import Packing, Recurrence, last_inputs
from .fixed_state_scan import l2_normed
from .kernels import input_features, recurrence
from .ssm import copied, local_parameters

# Shapes: B batch, T tokens, H heads of the state, G heads of queries and keys (H, or 1 for all),
#         K key width, V value width, W taps of the convolution, E its channels (2 G K + H V).

# Rank of gated linear attention's gate; its log-decay is divided by the same number (Yang et al.,
# 2024, section 4.4).
LOW_RANK = 16


class StepSize(KeptInFloat32):
    """Parameters of the decay per head, and Mamba-2's skip D.

    The decay is exp(A softplus(x + dt_bias)), A = -exp(A_log). Called, it returns (A_log, dt_bias)
    or (A_log, dt_bias, D), each [H], as copies (`SSM` says why).

    Args:
        n_heads: H, the heads of the state.
        skip: True to have D.
    """

    def __init__(self, n_heads: int, *, skip: bool) -> None:
        """Makes A_log, dt_bias and, if `skip`, D, for `n_heads` heads of the state."""
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(n_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(n_heads, dtype=torch.float32))
        if skip:
            self.D = nn.Parameter(torch.empty(n_heads, dtype=torch.float32))

    def forward(self) -> tuple[Tensor, ...]:
        self.check_float32()
        return tuple(copied(parameter) for parameter in self.parameters())


class FixedStateMixer(Recurrence):
    """Base of the baselines.

    All have projections, a convolution with SiLU, the recurrence, a norm and an output gate, as
    far as the attributes say. A subclass sets the attributes below and computes its decay and step
    sizes in `_core`.

    Args:
        config: Configuration of the layer (an entry of `ModelConfig.layers`).
        execution: How to compute it. None means the defaults.

    Attributes:
        conv_bias: True if the convolution has a bias.
        always_silu: True if SiLU is applied without a convolution, too.
        gated: True if the output has a gate.
        delta: True for the delta rule, whose beta is a projection of x.
        shared_keys: True if all heads share one head of queries and keys.
    """

    conv_bias = False
    always_silu = True
    gated = True
    delta = False
    shared_keys = False

    def __init__(self, config: ModelConfig, execution: "Execution | None" = None) -> None:
        """Makes the layer's parameters for `config`, to be computed as `execution` says."""
        super().__init__()
        self.config = config.mixer
        self.layer = config
        self.execution = execution
        self.shape = state_shape(config.mixer, config.dim)
        dim = config.dim
        keys, values = self._widths(config)
        self.widths = keys, keys, values

        # Projections. Tensor-parallel ranks slice them by heads, but not keys that all heads share.
        self.wq = Linear(dim, keys)
        self.wk = Linear(dim, keys)
        self.wv = Linear(dim, values)
        self.wq.whole = self.shared_keys
        self.wk.whole = self.shared_keys
        self.conv = None
        if self.config.conv_width:
            self.conv = ShortConv(sum(self.widths), self.config.conv_width, self.conv_bias)

        # Decay, beta, and the output.
        self.ssm: StepSize | None = None
        self._make_decay(dim)
        self.wb = Linear(dim, self.shape.heads) if self.delta else None
        self.wg = Linear(dim, values) if self.gated else None
        self.norm = RMSNorm(self._norm_width(), eps=config.norm_eps)
        self.wo = Linear(values, dim)

    def _make_decay(self, dim: int) -> None:
        """Makes the parameters of the decay, if the baseline has any."""

    def _norm_width(self) -> int:
        return self.shape.value_width

    def _core(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ssm_tensors: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Calls `recurrence` with the baseline's decay and beta.

        Args:
            x: Hidden states, [B, T, dim].
            q: Queries, [B, T, G, K].
            k: Keys, [B, T, G, K].
            v: Values, [B, T, H, V].
            ssm_tensors: This layer's entry in the result of `ssm_tensors`.
            options: Keyword arguments of `recurrence`.
        Returns:
            The output, [B, T, H, V], and the state after the last token, [B, H, K, V].
        """
        raise NotImplementedError

    def _gate(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """Normalises each head and applies the gate: o [B, T, H, V] -> [B, T, H V].

        Args:
            o: The recurrence's output.
            gate: Before its SiLU, [B, T, H V]. None for a mixer without one.
        """
        # PyTorch's norm is one kernel only if both tensors have one dtype.
        o = self.norm(o.to(self.norm.weight.dtype)).flatten(2)
        if gate is None:
            return o
        return o * F.silu(gate)

    def forward(
        self,
        x: Tensor,
        rope: Any = None,
        ssm_tensors: tuple[Tensor, ...] | None = None,
        state: MixerState | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Mixes tokens: x [B, T, dim] -> [B, T, dim].

        Args:
            x: Hidden states after the layer's norm. Megatron gives a dict of their projections.
            rope: Ignored: no baseline rotates queries or keys.
            ssm_tensors: This layer's entry in the result of `ssm_tensors`. None means that it is
                computed here.
            state: The state to continue from. It is advanced past the last token, in place.
            packing: Documents and padding of the rows. None means one document in each row.
        """
        documents, back, lengths = packing or Packing()
        conv_past = self.config.conv_past

        # Under context parallelism the convolution reads the previous rank's last hidden states.
        tail = None
        if self.cp_rank is not None and self.conv is not None:
            tail = self.cp_rank.send_tail(x, conv_past)

        # Queries, keys and values go side by side through the convolution and SiLU: y [B, T, E].
        q = self.wq(x)
        k = self.wk(x)
        v = self.wv(x)
        widths = [q.shape[-1], k.shape[-1], v.shape[-1]]
        y = torch.cat([q, k, v], dim=-1)
        conv_inputs = None
        if self.conv is not None:
            past = None
            if state is not None:
                past = state.conv.to(y.dtype)
                conv_inputs = last_inputs(state.conv, y, conv_past, lengths)
            if self.cp_rank is not None and tail is not None:
                hidden = self.cp_rank.receive_tail(tail, x, back)
                past = torch.cat([self.wq(hidden), self.wk(hidden), self.wv(hidden)], dim=-1)
            y = self._convolved(y, past, documents)
        if self.always_silu or self.conv is not None:
            y = F.silu(y)
        q, k, v = y.split(widths, dim=-1)
        q = q.unflatten(-1, (-1, self.shape.key_width))  # [B, T, G, K]
        k = k.unflatten(-1, (-1, self.shape.key_width))
        v = v.unflatten(-1, (-1, self.shape.value_width))  # [B, T, H, V]

        # The recurrence. Context-parallel ranks compute the gate while they exchange their states.
        gate = None

        def compute_gate() -> None:
            nonlocal gate
            if self.wg is not None:
                gate = self.wg(x)

        if ssm_tensors is None:
            (ssm_tensors,) = self.ssm_tensors([self])
        options = dict(documents=documents, lengths=lengths)
        if state is not None:
            options["initial_state"] = state.ssm
        o, final_state = self._core(
            x,
            q,
            k,
            v,
            ssm_tensors,
            cp_rank=self.cp_rank,
            beside=compute_gate,
            **options,
        )
        if self.cp_rank is None:
            compute_gate()
        if state is not None:
            state.advance(state.conv if conv_inputs is None else conv_inputs, final_state)
        return self.wo(self._gate(o, gate))

    def _convolved(
        self,
        y: Tensor,
        past: Tensor | None,
        documents: Tensor | None,
    ) -> Tensor:
        """Convolves y [B, T, E] after the inputs `past` [B, W - 1, E], within documents [B, T].

        Args:
            y: Queries, keys and values side by side.
            past: Zeros if None.
            documents: Each token's document. None means one document in each row.
        """
        assert self.conv is not None
        weight, bias = self.conv()
        weight = self._local_channels(weight)
        bias = weight.new_zeros(len(weight)) if bias is None else self._local_channels(bias)
        convolved = input_features(
            y,
            math.gcd(y.shape[2], 64),  # any width of a head: the convolution does not see heads
            conv=(weight, bias),
            past=past,
            documents=documents,
            execution=self.execution,
        )
        return convolved.flatten(2)

    def _local_channels(self, x: Tensor) -> Tensor:
        """Slices x [E, ...] to the channels of q, k and v on this tensor-parallel rank."""
        if self.tp_rank is None:
            return x
        q, k, v = x.split(self.widths)
        if not self.shared_keys:
            q = local_slice(q, self.tp_rank)
            k = local_slice(k, self.tp_rank)
        return torch.cat([q, k, local_slice(v, self.tp_rank)])

    def _per_head(self, x: Tensor) -> Tensor:
        """Slices x [..., H] or [..., H K] to this tensor-parallel rank's heads, in float32."""
        return widened(local_slice(x, self.tp_rank, -1))

    @staticmethod
    def ssm_tensors(
        mixers: "list[FixedStateMixer]", dtype: torch.dtype = torch.float32
    ) -> list[tuple[Tensor, ...]]:
        """Returns the parameters in each mixer's `StepSize`, of its heads on this rank.

        Args:
            mixers: Mixers with the same settings.
            dtype: The least precise dtype of the result.
        """
        layers = []
        for mixer in mixers:
            own = []
            if mixer.ssm is not None:
                own = local_parameters(mixer.ssm, mixer.tp_rank, dtype)
            layers.append(tuple(own))
        return layers

    @classmethod
    def state_shapes(cls, config: ModelConfig, ranks: int = 1) -> dict[str, tuple[int, ...]]:
        """Returns the shapes conv [W - 1, E] and ssm [H, K, V] on one of `ranks` ranks."""
        H, K, V = state_shape(config.mixer, config.dim)
        keys, values = cls._widths(config)
        if not cls.shared_keys:
            keys //= ranks
        channels = 2 * keys + values // ranks
        return {"conv": (config.mixer.conv_past, channels), "ssm": (H // ranks, K, V)}

    # Costs.

    @classmethod
    def _widths(cls, config: ModelConfig) -> tuple[int, int]:
        """Returns the width of the queries, which is that of the keys, and of the values.

        Args:
            config: Configuration of the layer.
        """
        H, K, V = state_shape(config.mixer, config.dim)
        if cls.shared_keys:
            return K, H * V
        return H * K, H * V

    @classmethod
    def macs(cls, config: ModelConfig, seq_len: int) -> dict[str, int]:
        """Counts the chunks of `plain_recurrence`; a triangular system takes half a product.

        Args:
            config: Configuration of the layer.
            seq_len: Tokens of a sequence; a chunk is not longer.
        """
        H, K, V = state_shape(config.mixer, config.dim)
        keys, _ = cls._widths(config)
        L = min(CHUNK, seq_len)
        # Scores; values within the chunk; reading the state and adding to it.
        core = L * keys + H * (L * V + 2 * K * V)
        if cls.delta:
            # Scores of keys; the triangular system; what it reads of the state.
            core += L * keys + H * (L * (K + V) // 2 + K * V)
        return {"mixer": core}

    @classmethod
    def saved_elements(cls, config: ModelConfig) -> tuple[int, int]:
        """Counts what flash-linear-attention's kernels save.

        In plain PyTorch autograd saves more, mostly the states between chunks.
        """
        keys, values = cls._widths(config)
        has_conv = bool(config.mixer.conv_width)
        # Inputs of the convolution, of SiLU and of the recurrence.
        copies = 1 + has_conv + (cls.always_silu or has_conv)
        token = copies * (2 * keys + values)
        # Inputs of the norm and of the last matrix; the gate, its SiLU and the product.
        token += (2 + 3 * cls.gated) * values
        # Float32 copies, each of which counts as two elements: normalised queries and keys, and a
        # gate per channel.
        if cls.delta:
            token += 8 * keys
        if config.mixer.kind == "gla":
            token += 6 * keys
        return token, 0

    @classmethod
    def received_elements(
        cls,
        config: ModelConfig,
        context: int,
        tensor: int,
    ) -> tuple[int, int]:
        """Counts two all-to-alls of a share of the rows: A and B, and states (`fla_kernels`).

        Args:
            config: Configuration of the layer.
            context: The number of context-parallel ranks.
            tensor: The number of tensor-parallel ranks.
        """
        H, K, V = state_shape(config.mixer, config.dim)
        # The delta rules exchange whole heads: B, the matrix A, and a state. With a decay, single
        # rows of heads are exchanged: a row of B, its decay, and a row of a state.
        rows = H // tensor
        per_row = K * (2 * V + K)
        if not cls.delta:
            rows *= K
            per_row = 2 * V + 1
        # -(-a // b) rounds up: every rank gets the same number of rows.
        return (context - 1) * -(-rows // context) * per_row, 0


class GLAMixer(LocalParameters, FixedStateMixer):
    """Gated linear attention (Yang et al., 2024, section 4.4: https://arxiv.org/abs/2312.06635).

    Its decay is per channel of the keys: log_decay = log sigmoid(W2 W1 x + b) / 16. By default it
    has no convolution, and then no SiLU.
    """

    always_silu = False

    def _make_decay(self, dim: int) -> None:
        self.gate_down = Linear(dim, LOW_RANK)
        self.gate_up = Linear(LOW_RANK, self.widths[0])
        self.gate_bias = nn.Parameter(torch.empty(self.widths[0]))

    def _core(self, x, q, k, v, ssm_tensors, **options):
        """Computes the decay per channel of k from x, and calls `recurrence`.

        x is [B, T, dim], q and k are [B, T, H, K], v is [B, T, H, V] and `ssm_tensors` is empty.
        See
        `FixedStateMixer._core` for the result.
        """
        # A low-rank gate per channel of the keys, [B, T, H K].
        gate = widened(self.gate_up(self.gate_down(x))) + self.local("gate_bias")
        log_decay = F.logsigmoid(local_slice(gate, self.tp_rank, -1)) / LOW_RANK
        log_decay = log_decay.unflatten(-1, (-1, k.shape[-1]))  # [B, T, H, K]
        q = q * q.shape[-1] ** -0.5
        return self.call_core(recurrence, q, k, v, log_decay, **options)


class DeltaNetMixer(FixedStateMixer):
    """DeltaNet (Yang et al., 2024, eq. 5 and section 3.4: https://arxiv.org/abs/2406.06484).

    Queries and keys are l2-normalised, and beta = sigmoid(Wb x). It has no decay and no output
    gate.
    """

    gated = False
    delta = True

    def _core(self, x, q, k, v, ssm_tensors, **options):
        """Normalises q and k, computes beta from x, and calls `recurrence`.

        x is [B, T, dim], q and k are [B, T, H, K], and v is [B, T, H, V]. `ssm_tensors` is empty,
        or
        (A_log, dt_bias) of gated DeltaNet. See `FixedStateMixer._core` for the result.
        """
        assert self.wb is not None
        q = l2_normed(widened(q)).to(v.dtype)
        k = l2_normed(widened(k)).to(v.dtype)
        beta = torch.sigmoid(self._per_head(self.wb(x)))  # [B, T, H]
        log_decay = self._log_decay(x, ssm_tensors)
        q = q * q.shape[-1] ** -0.5
        return self.call_core(
            recurrence,
            q,
            k,
            v,
            log_decay,
            beta,
            **options,
        )

    def _log_decay(self, x: Tensor, ssm_tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Returns the log-decay of each token, [B, T, H]; None for a mixer without decay.

        Args:
            x: Hidden states, [B, T, dim].
            ssm_tensors: This layer's entry in the result of `ssm_tensors`.
        """
        return None


class GatedDeltaNetMixer(DeltaNetMixer):
    """Gated DeltaNet (Yang et al., 2025, eq. 10 and section 3.4: https://arxiv.org/abs/2412.06464).

    It is DeltaNet with an output gate and Mamba-2's decay per head, A softplus(Wa x + dt_bias).
    """

    gated = True

    def _make_decay(self, dim: int) -> None:
        self.wa = Linear(dim, self.shape.heads)
        self.ssm = StepSize(self.shape.heads, skip=False)

    def _log_decay(self, x: Tensor, ssm_tensors: tuple[Tensor, ...]) -> Tensor:
        """Computes A dt from x [B, T, dim]; `ssm_tensors` is (A_log, dt_bias), [H] each."""
        A_log, dt_bias = ssm_tensors
        return -A_log.exp() * F.softplus(self._per_head(self.wa(x)) + dt_bias)  # [B, T, H]


class Mamba2Mixer(FixedStateMixer):
    """Mamba-2 (Dao & Gu, 2024, section 7: https://arxiv.org/abs/2405.21060).

    It is computed by its duality with attention: in `recurrence`, q is C, k is B (one head for
    all), v is dt x and log_decay is A dt, with dt = softplus(Wa x + dt_bias). D x is added to the
    output. The gate comes before the norm, which is over all heads.
    """

    conv_bias = True
    shared_keys = True

    def _norm_width(self) -> int:
        return self.shape.heads * self.shape.value_width

    def _make_decay(self, dim: int) -> None:
        self.wa = Linear(dim, self.shape.heads)
        self.ssm = StepSize(self.shape.heads, skip=True)

    def _core(self, x, q, k, v, ssm_tensors, **options):
        """Computes dt from x, scales v by it, and adds the skip D v to the output.

        x is [B, T, dim], q and k are [B, T, 1, K], v is [B, T, H, V], and `ssm_tensors` is (A_log,
        dt_bias, D), each [H]. See `FixedStateMixer._core` for the result.
        """
        A_log, dt_bias, D = ssm_tensors
        dt = F.softplus(self._per_head(self.wa(x)) + dt_bias)  # [B, T, H]
        scaled = (v * dt[..., None]).to(v.dtype)
        log_decay = -A_log.exp() * dt
        o, final_state = self.call_core(
            recurrence,
            q,
            k,
            scaled,
            log_decay,
            **options,
        )
        skipped = o + D[:, None] * v
        return skipped.to(v.dtype), final_state

    def _gate(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """Applies the gate [B, T, H V], then the norm of all heads, to o [B, T, H, V]."""
        assert gate is not None
        y = (o.flatten(2) * F.silu(gate)).to(self.norm.weight.dtype)
        if self.tp_rank is None:
            return self.norm(y)
        # The norm is over the heads of all tensor-parallel ranks: sum their squares.
        squares = widened(y).square().sum(-1, keepdim=True)
        mean = self.tp_rank.gather(squares).sum(0) / self._norm_width()
        weight = local_slice(self.norm.local(), self.tp_rank)
        normalized = widened(y) * (mean + self.layer.norm_eps).rsqrt() * weight
        return normalized.to(y.dtype)


MIXERS: dict[str, type[FixedStateMixer]] = {
    "gla": GLAMixer,
    "mamba2": Mamba2Mixer,
    "deltanet": DeltaNetMixer,
    "gated-deltanet": GatedDeltaNetMixer,
}
