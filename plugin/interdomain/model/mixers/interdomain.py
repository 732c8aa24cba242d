"""The interdomain mixer and its ablations: three switches around one recurrence (paper, figure 3)."""

from typing import Any

import torch
from torch import Tensor

from interdomain.scan.step import decay_factor
from interdomain.scan.tables import CHUNK, multiply, powers

from ..config import Execution, ModelConfig
from ..feature_maps import FEATURE_MAPS, GATES, divided, feature_map, widened
from ..layers import InputNorm, Linear, OutputNorm, ShortConv
from ..shard import shard_of
from ..state import MixerState
from .base import Packing, Recurrence, last_inputs, take
from .kernels import (
    input_features,
    input_features_step,
    interdomain_scan,
    interdomain_step,
    linear_scan,
    linear_step,
)
from .ssm import Dynamics, SSMDynamics, fold

# Shapes: B batch, T time, H query heads, G heads of keys and state, R key features, D value width (R = D = head_dim),
#         M basis functions, W convolution width, E channels.


class InterdomainMixer(Recurrence):
    """o_t = Re(q_t^T U_t^T Gamma_t) over a state of fixed size (paper eq. 13), or the linear readout of s4d.

    With a single input, the projections a and b of the paper take the places (and names) of k and v.
    """

    def __init__(self, config: ModelConfig, execution: "Execution | None" = None) -> None:
        super().__init__()
        mixer = config.mixer
        self.config, self.layer, self.execution = mixer, config, execution
        if execution is not None:
            execution.refuse_map(mixer)
        self.head_dim = config.head_dim
        self.n_heads = config.n_heads if mixer.query_readout else 0
        self.n_kv_heads = config.n_kv_heads
        kv_dim = config.n_kv_heads * config.head_dim
        out_dim = config.dim if mixer.query_readout else 2 * config.dim

        def short_conv(channels: int, wanted: bool) -> ShortConv | None:
            return ShortConv(channels, mixer.conv_width) if wanted and mixer.conv_width else None

        self.wq = Linear(config.dim, config.dim) if mixer.query_readout else None
        self.q_conv = short_conv(config.dim, mixer.query_readout)
        self.wk = Linear(config.dim, kv_dim)
        self.k_conv = short_conv(kv_dim, True)
        self.wv = Linear(config.dim, kv_dim)
        self.v_conv = short_conv(kv_dim, not mixer.dual_input)

        self.feature_map = feature_map(mixer.feature_map, self.n_kv_heads, self.head_dim)
        # These features keep scale and sign, for they estimate a kernel: no input norm (paper, recurrent projection).
        norm = self.feature_map is None
        self.k_norm = InputNorm(self.n_kv_heads, self.head_dim, config.norm_eps) if norm else None
        self.v_norm = InputNorm(self.n_kv_heads, self.head_dim, config.norm_eps) if norm else None

        self.ssm = SSMDynamics(
            self.n_kv_heads, mixer.n_basis, c_form=mixer.c_form, linear=not mixer.query_readout
        )
        soft = mixer.output_norm == "soft"
        self.o_norm = (
            OutputNorm(self.head_dim, config.norm_eps, soft=soft)
            if mixer.output_norm != "none"
            else None
        )
        self.wg = Linear(config.dim, out_dim) if mixer.output_gate else None
        self.wo = Linear(out_dim, config.dim)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        dynamics: tuple[Tensor, Tensor] | None = None,
        state: MixerState | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; with a state, continues from it and advances it past the last token.

        rope: cos and sin, each [T, 1, R / 2] or [B, T, 1, R / 2].
        """
        if (
            state is not None
            and x.shape[1] == 1
            and state.prepared is not None
            and not torch.is_grad_enabled()
        ):
            o = self._step(x, rope, state, *state.prepared)
            gate = self._gate(x)
        else:
            dynamics = dynamics or self.dynamics([self])[0]
            o, gate = self._sequence(x, rope, dynamics, state, packing or Packing())
        if self.o_norm is not None:
            o = self.o_norm(o)
        o = o.flatten(2)  # [B, T, H * D], or [B, T, H * (R + D)] for the linear readout
        return self.wo(o if gate is None else gate * o)

    def _sequence(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        dynamics: tuple[Tensor, Tensor],
        state: MixerState | None,
        packing: Packing,
    ) -> tuple[Tensor, Tensor | None]:
        """Any number of tokens: the output of the core, [B, T, H, D], and the gate.

        Projections are computed one after the other, so that none lives longer than it is needed.
        """
        documents, back, lengths = packing
        log_decay, table = dynamics
        backend = "auto" if self.execution is None else self.execution.backend

        # The convolutions' inputs before x: those that a state holds, or projections of the hidden states before this shard.
        q_past = k_past = v_past = None
        tail = None
        if state is not None and self.k_conv is not None:
            ranks = 1 if self.heads is None else self.heads.size
            convs = self.q_conv, self.k_conv, self.v_conv
            widths = [0 if conv is None else len(conv.weight) // ranks for conv in convs]
            q_past, k_past, v_past = state.conv.split(widths, dim=2)
        elif self.shard is not None and self.k_conv is not None:
            tail = self.shard.send_tail(x, self.config.conv_past)
        inputs = []  # for the convolutions after x
        last = slice(-self.config.conv_past if lengths is None else None, None)

        k = self.wk(x)
        if (
            self.shard is not None and tail is not None
        ):  # it has arrived beside the first projection
            hidden = self.shard.receive_tail(tail, x, back)
            q_past = None if self.wq is None else self.wq(hidden)
            k_past = self.wk(hidden)
            v_past = None if self.v_conv is None else self.wv(hidden)
        if state is not None:
            inputs.append(k[:, last])
        k = self._key(k, rope, k_past, documents)

        v = self.wv(x)
        if state is not None and self.v_conv is not None:
            inputs.append(v[:, last])
        v = self._value(v, v_past, documents)

        # A shard's state is on its way beside the queries and the gate.
        written = [k, v] if self.wq is not None else [torch.cat([k, v], dim=-1)]
        group: Any = ""
        if self.shard is not None:
            group = self.shard.send_state(written, log_decay, documents, backend)

        q = None
        if self.wq is not None:
            q = self.wq(x)
            if state is not None:
                inputs.insert(0, q[:, last])
            q = self._query(q, rope, q_past, documents)
        gate = self._gate(x)

        options: dict[str, Any] = dict(
            initial_state=None if state is None else state.ssm,
            final_state=state is not None,  # training needs no final state
            documents=documents,
            check_documents=False,
            group=group,
            execution=self.execution,
        )
        if q is None:
            o, final = self.call_core(linear_scan, *written, log_decay, table, **options)
        else:
            o, final = self.call_core(interdomain_scan, q, k, v, log_decay, table, **options)
            if self.config.normalize:
                o = divided(o, v)

        if state is not None:
            if lengths is not None:
                final = _state_after(torch.cat(written, dim=-1), log_decay, state.ssm, lengths)
            conv = state.conv
            if self.k_conv is not None:
                conv = last_inputs(conv, torch.cat(inputs, dim=2), self.config.conv_past, lengths)
            state.advance(conv, final)
        return o, gate

    def _gate(self, x: Tensor) -> Tensor | None:
        return None if self.wg is None else GATES[self.config.gate_function](self.wg(x))

    def _query(self, x: Tensor, rope: Any, past: Tensor | None, documents: Tensor | None) -> Tensor:
        q = self._features(x, rope, self.q_conv, past, documents, silu=True)
        return q if self.feature_map is None else self.feature_map(q, self.heads, query=True)

    def _key(self, x: Tensor, rope: Any, past: Tensor | None, documents: Tensor | None) -> Tensor:
        mapped = self.config.dual_input
        k = self._features(x, rope, self.k_conv, past, documents, silu=mapped, norm=self.k_norm)
        return self.feature_map(k, self.heads) if mapped and self.feature_map is not None else k

    def _value(self, x: Tensor, past: Tensor | None, documents: Tensor | None) -> Tensor:
        v = self._features(x, None, self.v_conv, past, documents, silu=False, norm=self.v_norm)
        return _with_ones(v) if self.config.normalize else v

    def _features(
        self,
        x: Tensor,
        rope: Any,
        conv: ShortConv | None,
        past: Tensor | None,
        documents: Tensor | None,
        *,
        silu: bool,
        norm: InputNorm | None = None,
    ) -> Tensor:
        """Convolution, RoPE, SiLU with the l2 norm, and input norm of a projection x [B, T, E]: [B, T, H, R]."""
        options: dict[str, Any] = {}
        if conv is not None:
            weight, bias = conv()
            parameters = shard_of(weight, self.heads), shard_of(bias, self.heads)
            options |= dict(conv=parameters, past=past, documents=documents)
        if norm is not None:
            scale, shift = norm()
            options |= dict(norm=(scale, shard_of(shift, self.heads)), eps=norm.eps)
        return input_features(
            x,
            self.head_dim,
            rope=rope if self.config.rope else None,
            silu=silu and self.feature_map is None,
            execution=self.execution,
            **options,
        )

    @staticmethod
    def dynamics(
        mixers: "list[InterdomainMixer]", dtype: torch.dtype = torch.float32
    ) -> list[tuple[Tensor, Tensor]]:
        """(log_decay, mixing or readout) of each mixer, of `dtype` where the parameters have less."""
        parts = []
        for mixer in mixers:
            local = []  # this tensor-parallel rank's heads
            for parameter in mixer.ssm():
                if parameter is not None:
                    parameter = shard_of(
                        parameter.to(torch.promote_types(parameter.dtype, dtype)), mixer.heads
                    )
                local.append(parameter)
            parts.append(Dynamics(*local))
        return fold(parts, mixers[0].config.readout)

    # Decoding

    def init_state(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        dynamics: tuple[Tensor, Tensor],
    ) -> MixerState:
        shapes = self.state_shapes(self.layer)
        return MixerState(
            conv=torch.zeros(batch, *shapes["conv"], dtype=dtype, device=device),
            ssm=torch.zeros(batch, *shapes["ssm"], dtype=dynamics[0].dtype, device=device),
            prepared=self._prepare_step(*dynamics),
        )

    @classmethod
    def state_shapes(cls, config: ModelConfig, ranks: int = 1) -> dict[str, tuple[int, ...]]:
        m = config.mixer
        ssm = config.n_kv_heads // ranks, m.n_basis, 2 * config.head_dim + m.normalize, 2
        return {"conv": (m.conv_past, cls._channels(config) // ranks), "ssm": ssm}

    @torch.no_grad()
    def _prepare_step(
        self, log_decay: Tensor, readout: Tensor
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parameters in the forms that the two step functions want: made once for all steps."""
        mixer = self.config
        modules = self.q_conv, self.k_conv, self.v_conv
        convs = [conv() for conv in modules if conv is not None]
        features: dict[str, Any] = dict(
            rotated=(self.n_heads + self.n_kv_heads) * mixer.rope,
            silu=(self.n_heads + self.n_kv_heads * mixer.dual_input) * (self.feature_map is None),
        )
        if convs:
            weights = torch.cat([widened(weight)[:, 0].mT for weight, _ in convs], dim=1)
            features |= dict(conv=(weights, torch.cat([widened(bias) for _, bias in convs])))
        if self.k_norm is not None and self.v_norm is not None:
            norms = self.k_norm(), self.v_norm()
            scale = torch.cat([widened(scale).expand(shift.shape) for scale, shift in norms])
            features |= dict(
                norm=(scale, torch.cat([widened(shift) for _, shift in norms])), eps=self.k_norm.eps
            )
        log_decay, readout = log_decay.detach(), readout.detach()
        if mixer.query_readout and mixer.readout == "complex":
            readout = readout[
                :, : mixer.n_basis
            ].contiguous()  # the other half holds the same numbers
        table = {"mixing" if mixer.query_readout else "readout": readout}
        return features, dict(log_decay=log_decay, decay=decay_factor(log_decay), **table)

    def _step(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        state: MixerState,
        features: dict[str, Any],
        tables: dict[str, Any],
    ) -> Tensor:
        """One token, x [B, 1, dim] -> [B, 1, H, D], by the kernels' two step functions (`_prepare_step`)."""
        projections = (
            [self.wk(x), self.wv(x)] if self.wq is None else [self.wq(x), self.wk(x), self.wv(x)]
        )
        y = input_features_step(
            torch.cat(projections, dim=2)[:, 0],
            self.head_dim,
            past=state.conv if "conv" in features else None,
            rope=rope if self.config.rope else None,
            execution=self.execution,
            **features,
        )
        q, k, v = y[:, None].split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=2)
        if self.feature_map is not None and self.config.dual_input:
            k = self.feature_map(k)
        if self.config.normalize:
            v = _with_ones(v)
        if self.wq is None:
            return linear_step(torch.cat([k, v], dim=-1)[:, 0], state=state.ssm, **tables)[:, None]
        if self.feature_map is not None:
            q = self.feature_map(q, query=True)
        o = interdomain_step(q[:, 0], k[:, 0], v[:, 0], state=state.ssm, **tables)[:, None]
        return divided(o, v) if self.config.normalize else o

    # Costs

    @staticmethod
    def macs(config: ModelConfig, seq_len: int) -> dict[str, int]:
        """The core by the chunkwise passes of docs/kernels.md."""
        m, H, G, R = config.mixer, config.n_heads, config.n_kv_heads, config.head_dim
        D, M2, L = R + m.normalize, 2 * m.n_basis, min(CHUNK, seq_len)
        xi = FEATURE_MAPS[m.feature_map]
        vectors = int(xi.vectors * R) if xi else 0  # of width R, per head of query and key features
        linear = (H * m.query_readout + G * m.dual_input) * R * vectors
        if (
            not m.query_readout
        ):  # a Toeplitz product within the chunk; state update and readout across chunks
            return {"linear": linear, "mixer": H * (L * 2 * R + 2 * M2 * 2 * R)}
        pass1 = (
            H * (L * R + L * M2 + R * M2) + G * R * M2
        )  # scores, times the table; state read; state update
        pass2 = H * (L * M2 + L * D + D * M2) + G * D * M2
        return {"linear": linear, "mixer": pass1 + H * M2 * M2 + pass2}

    @staticmethod
    def _channels(config: ModelConfig) -> int:
        """Channels of the convolutions, of q, k and v side by side."""
        m, kv_dim = config.mixer, config.n_kv_heads * config.head_dim
        return (m.query_readout * config.dim + kv_dim * (1 if m.dual_input else 2)) * (
            m.conv_width != 0
        )

    @staticmethod
    def kept(config: ModelConfig) -> tuple[int, int]:
        """The scores are a, 2M numbers per query head."""
        query = config.mixer.query_readout
        token = (3 if query else 2) * config.dim + (config.mixer.output_norm != "none") * config.dim
        token += 4 * config.n_kv_heads * config.head_dim
        return token, query * config.n_heads * 2 * config.mixer.n_basis

    @staticmethod
    def received(config: ModelConfig, context: int, tensor: int) -> tuple[int, int]:
        """Two all-to-alls of the N-th part of a state's rows, and a number that says whether a document begins."""
        m, heads = config.mixer, config.n_kv_heads // tensor
        rows, P = -(-heads * m.n_basis // context), 2 * config.head_dim + m.normalize
        return (context - 1) * (2 * 2 * rows * P + 1), 0


def _state_after(z: Tensor, log_decay: Tensor, state: Tensor, lengths: Tensor) -> Tensor:
    """X after each row's first `lengths` tokens, Lambda^lengths X + sum_j Lambda^(lengths - 1 - j) z_j, [B, H, M, P, 2].

    The scan's own last state has also decayed over the padding behind them. z: [B, T, H, P].
    """
    T = z.shape[1]
    t = torch.arange(T, device=z.device)
    from_end = t - (T - lengths[:, None])  # the token that is in each place with the tokens last
    z = torch.where(
        (from_end >= 0)[:, :, None, None], take(z, from_end.clamp_min(0)).to(log_decay.dtype), 0
    )
    weights = powers(log_decay, T - 1 - t)
    added = torch.stack([torch.einsum("bthp,htm->bhmp", z, x) for x in weights.unbind(-1)], dim=-1)
    passed = powers(log_decay, lengths).transpose(0, 1)[:, :, :, None]
    return multiply(passed, state) + added


def _with_ones(v: Tensor) -> Tensor:
    """v with the ones channel: its coefficients are eta of paper eq. 9."""
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
