"""The interdomain mixer and its ablations: three switches around one recurrence (paper, figure 3).

What the layer computes for token t, per head (paper, section "Our architecture"; SC is the short
convolution, N+b the input norm of eq. 12, and xi the feature map of eq. 10 without its SC):

    query     q_t = xi(RoPE(SC(Wq x_t)))            only with `query_readout`
    key       k_t = N+b(xi(RoPE(SC(Wk x_t))))       `dual_input`; else N+b(RoPE(SC(Wk x_t)))
    value     v_t = N+b(Wv x_t)                     `dual_input`; else N+b(SC(Wv x_t))
    state     X_t = Lambda X_(t-1) + z_t^T,         z_t = [k_t; v_t] (eq. 11)
    readout   o_t = Re(q_t^T U_t^T Gamma_t)         `query_readout` (eq. 13)
              o_t = Re(sum_m c_m (C x_t)_m)         else: S4D's linear readout

RoPE is the third switch, `rope`. Feature maps other than SiLU have no N+b. With a single input the
projections a and b of the paper take the places, and the names, of k and v. The scan keeps the
unit-gain state X: the paper's state is x = beta X, and beta, C and the kind of readout are folded
into one matrix per head (`ssm.py`).
"""

from typing import Any

import torch
from torch import Tensor

from interdomain.scan.step import decay_factor
from interdomain.scan.tables import CHUNK, multiply, powers

from ..config import Execution, ModelConfig
from ..feature_maps import FEATURE_MAPS, GATES, divided, feature_map, widened
from ..layers import InputNorm, Linear, OutputNorm, ShortConv
from ..parallel import local_slice
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
from .ssm import SSM, SSMParameters, discretize, local_parameters

# Shapes: B batch, T tokens, H query heads, G heads of keys, values and state (n_kv_heads),
#         R key features, D value width (both head_dim, D one more with `normalize`), P = R + D,
#         M basis functions, W taps of the convolution, E channels of the convolutions.


class InterdomainMixer(Recurrence):
    """Interdomain attention, o_t = Re(q_t^T U_t^T Gamma_t) (paper eq. 13), or an ablation of it.

    Args:
        config: Configuration of the layer (an entry of `ModelConfig.layers`).
        execution: How to compute it. None means the defaults.
    Raises:
        ValueError: `execution` asks for a Triton kernel that the feature map does not have.
    """

    def __init__(self, config: ModelConfig, execution: "Execution | None" = None) -> None:
        """Makes the layer's parameters for `config`, to be computed as `execution` says."""
        super().__init__()
        mixer = config.mixer
        self.config = mixer
        self.layer = config
        self.execution = execution
        if execution is not None:
            execution.check_feature_map(mixer)
        self.head_dim = config.head_dim
        self.n_heads = config.n_heads if mixer.query_readout else 0
        self.n_kv_heads = config.n_kv_heads
        kv_dim = config.n_kv_heads * config.head_dim

        # The projections, each with the convolution that follows it (SC of eq. 10).
        self.wq = None
        self.q_conv = None
        if mixer.query_readout:
            self.wq = Linear(config.dim, config.dim)
            self.q_conv = self._short_conv(config.dim)
        self.wk = Linear(config.dim, kv_dim)
        self.k_conv = self._short_conv(kv_dim)
        self.wv = Linear(config.dim, kv_dim)
        self.v_conv = None
        if not mixer.dual_input:
            self.v_conv = self._short_conv(kv_dim)

        # The feature map, and the input norm of keys and values (eq. 12). A map other than SiLU
        # estimates a kernel: its features must keep their scale and sign, so they have no norm.
        self.feature_map = feature_map(mixer.feature_map, self.n_kv_heads, self.head_dim)
        self.k_norm = None
        self.v_norm = None
        if self.feature_map is None:
            self.k_norm = InputNorm(self.n_kv_heads, self.head_dim, config.norm_eps)
            self.v_norm = InputNorm(self.n_kv_heads, self.head_dim, config.norm_eps)

        # Delta, A, C, and c of the linear readout, whose heads are R + D wide.
        linear = not mixer.query_readout
        self.ssm = SSM(self.n_kv_heads, mixer.n_basis, c_form=mixer.c_form, linear=linear)
        out_dim = 2 * config.dim if linear else config.dim
        self.o_norm = None
        if mixer.output_norm != "none":
            soft = mixer.output_norm == "soft"
            self.o_norm = OutputNorm(self.head_dim, config.norm_eps, soft=soft)
        self.wg = Linear(config.dim, out_dim) if mixer.output_gate else None
        self.wo = Linear(out_dim, config.dim)

    def _short_conv(self, channels: int) -> ShortConv | None:
        return ShortConv(channels, self.config.conv_width) if self.config.conv_width else None

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        ssm_tensors: tuple[Tensor, Tensor] | None = None,
        state: MixerState | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Mixes tokens: x [B, T, dim] -> [B, T, dim].

        Args:
            x: Hidden states after the layer's norm. Megatron gives a dict of their projections.
            rope: cos and sin of the rotary angles, each [T, 1, R / 2] or [B, T, 1, R / 2]. A mixer
                without `rope` ignores them.
            ssm_tensors: This layer's (log_decay [G, M, 2], mixing [G, 2M, 2M] or readout [G, 2M])
                from `ssm_tensors`. None means that they are computed here.
            state: The state to continue from. It is advanced past the last token, in place.
            packing: Documents and padding of the rows. None means one document in each row.
        """
        if not self.config.rope:
            rope = None
        # The step kernels compute one token. They record no gradients.
        has_step = state is not None and state.prepared is not None
        if has_step and x.shape[1] == 1 and not torch.is_grad_enabled():
            o = self._step(x, rope, state)
            gate = self._gate(x)
        else:
            if ssm_tensors is None:
                (ssm_tensors,) = self.ssm_tensors([self])
            o, gate = self._sequence(
                x,
                rope,
                ssm_tensors,
                state,
                packing or Packing(),
            )

        # The output norm (not in the paper), the output gate (disabled in its scaling runs), and
        # Wo.
        if self.o_norm is not None:
            o = self.o_norm(o)
        o = o.flatten(2)  # [B, T, H * D], or [B, T, G * P] for the linear readout
        if gate is not None:
            o = gate * o
        return self.wo(o)

    def _gate(self, x: Tensor) -> Tensor | None:
        """Computes the output gate of x [B, T, dim], as wide as `wo`'s input; None without one."""
        if self.wg is None:
            return None
        return GATES[self.config.gate_function](self.wg(x))

    def _sequence(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        ssm_tensors: tuple[Tensor, Tensor],
        state: MixerState | None,
        packing: Packing,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes any number of tokens by the scan.

        The projections are computed one after the other, so that none lives longer than needed.

        Args:
            x: Hidden states, [B, T, dim], or Megatron's dict of their projections.
            rope: cos and sin of the rotary angles. None means no rotation.
            ssm_tensors: (log_decay [G, M, 2], mixing [G, 2M, 2M] or readout [G, 2M]).
            state: The state to continue from, which is advanced in place. None means zeros, and no
                state is kept.
            packing: Documents, the inputs that convolutions may read, and padding of the rows.
        Returns:
            The readout, [B, T, H, head_dim] or [B, T, G, P], and the output gate (None without one).
        """
        documents, back, lengths = packing
        log_decay, table = ssm_tensors
        mixer = self.config

        # A convolution reads W - 1 inputs before x. A state has them, [q | k | v]. Under context
        # parallelism they are projections of the previous rank's last hidden states: sent now.
        q_past = None
        k_past = None
        v_past = None
        tail = None
        if self.k_conv is not None and state is not None:
            q_past, k_past, v_past = state.conv.split(self._conv_widths(), dim=2)
        elif self.k_conv is not None and self.cp_rank is not None:
            tail = self.cp_rank.send_tail(x, mixer.conv_past)
        # The new state takes the last inputs of the convolutions, [q | k | v]. With padding they
        # are not in the last places, so all inputs are collected.
        conv_inputs = []
        last = slice(-mixer.conv_past, None) if lengths is None else slice(None)

        # Keys. The previous rank's tail arrives beside the first projection.
        k = self.wk(x)
        if self.cp_rank is not None and tail is not None:
            hidden = self.cp_rank.receive_tail(tail, x, back)
            if self.wq is not None:
                q_past = self.wq(hidden)
            k_past = self.wk(hidden)
            if self.v_conv is not None:
                v_past = self.wv(hidden)
        if state is not None:
            conv_inputs.append(k[:, last])
        is_mapped = mixer.dual_input
        k = self._features(
            k,
            self.k_conv,
            k_past,
            documents,
            rope=rope,
            is_mapped=is_mapped,
            norm=self.k_norm,
        )
        if is_mapped and self.feature_map is not None:
            k = self.feature_map(k, self.tp_rank)  # [B, T, G, R]

        # Values.
        v = self.wv(x)
        if state is not None and self.v_conv is not None:
            conv_inputs.append(v[:, last])
        v = self._features(
            v,
            self.v_conv,
            v_past,
            documents,
            norm=self.v_norm,
        )
        if mixer.normalize:
            v = _with_ones(v)  # [B, T, G, D]

        # Context-parallel ranks exchange their states beside the queries and the gate.
        written = [k, v]
        if self.wq is None:
            written = [torch.cat([k, v], dim=-1)]  # z of the linear readout, [B, T, G, P]
        group: Any = ""
        if self.cp_rank is not None:
            backend = "auto" if self.execution is None else self.execution.backend
            group = self.cp_rank.send_state(written, log_decay, documents, backend)

        # Queries, and the output gate.
        core = linear_scan
        inputs = written
        if self.wq is not None:
            q = self.wq(x)
            if state is not None:
                conv_inputs.insert(0, q[:, last])
            q = self._features(
                q,
                self.q_conv,
                q_past,
                documents,
                rope=rope,
                is_mapped=True,
            )
            if self.feature_map is not None:
                q = self.feature_map(q, self.tp_rank, query=True)  # [B, T, H, R]
            core = interdomain_scan
            inputs = [q, k, v]
        gate = self._gate(x)

        # The recurrence and its readout (eqs. 11 and 13), or the ratio of eq. 9. `maps` records this
        # call.
        initial_state = None if state is None else state.ssm
        o, final_state = self.call_core(
            core,
            *inputs,
            log_decay,
            table,
            initial_state=initial_state,
            final_state=state is not None,  # training needs none
            documents=documents,
            check_documents=False,  # the caller made them from positions
            group=group,
            execution=self.execution,
        )
        if mixer.normalize:
            o = divided(o, v)  # v bounds the quotient

        # Advance the state. Over padding, the scan's final state has decayed too far.
        if state is not None:
            if lengths is not None:
                z = torch.cat(written, dim=-1)
                final_state = _state_after(z, log_decay, state.ssm, lengths)
            conv = state.conv
            if self.k_conv is not None:
                conv_inputs = torch.cat(conv_inputs, dim=2)
                conv = last_inputs(conv, conv_inputs, mixer.conv_past, lengths)
            state.advance(conv, final_state)
        return o, gate

    def _conv_widths(self) -> list[int]:
        """Channels of the convolutions of q, k and v on this tensor-parallel rank; 0 for none."""
        ranks = 1 if self.tp_rank is None else self.tp_rank.size
        widths = []
        for conv in (self.q_conv, self.k_conv, self.v_conv):
            widths.append(0 if conv is None else len(conv.weight) // ranks)
        return widths

    def _features(
        self,
        x: Tensor,
        conv: ShortConv | None,
        past: Tensor | None,
        documents: Tensor | None,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        is_mapped: bool = False,
        norm: InputNorm | None = None,
    ) -> Tensor:
        """Turns a projection into features by one kernel: SC, RoPE, SiLU with l2 norm, N+b.

        Args:
            x: A projection, [B, T, E].
            conv: The convolution. None means none.
            past: The convolution's W - 1 inputs before x, [B, W - 1, E]. None means zeros.
            documents: Each token's document, [B, T].
            rope: cos and sin of the rotary angles. None means no rotation.
            is_mapped: True for queries and keys that go through the feature map. Only SiLU is part
                of this kernel.
            norm: The input norm. None means none.
        Returns:
            [B, T, H, R], or [B, T, G, R] for keys and values.
        """
        # Tensor-parallel ranks slice what has one entry per channel or per head.
        options: dict[str, Any] = {}
        if conv is not None:
            weight, bias = conv()
            own = local_slice(weight, self.tp_rank), local_slice(bias, self.tp_rank)
            options |= dict(conv=own, past=past, documents=documents)
        if norm is not None:
            scale, shift = norm()
            options |= dict(norm=(scale, local_slice(shift, self.tp_rank)), eps=norm.eps)
        return input_features(
            x,
            self.head_dim,
            rope=rope,
            silu=is_mapped and self.feature_map is None,
            execution=self.execution,
            **options,
        )

    @staticmethod
    def ssm_tensors(
        mixers: "list[InterdomainMixer]", dtype: torch.dtype = torch.float32
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns `discretize` of each mixer, for the heads on this rank.

        Args:
            mixers: Mixers with the same settings.
            dtype: The least precise dtype to compute in.
        """
        layers = []
        for mixer in mixers:
            layers.append(SSMParameters(*local_parameters(mixer.ssm, mixer.tp_rank, dtype)))
        return discretize(layers, mixers[0].config.readout)

    # Decoding: steps of one token.

    @torch.no_grad()
    def _prepare_step(
        self, ssm_tensors: tuple[Tensor, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arranges the parameters for the step kernels, once for all steps.

        Args:
            ssm_tensors: log_decay [G, M, 2], and mixing [G, 2M, 2M] or readout [G, 2M].
        Returns:
            Keyword arguments of `input_features_step`, and of `interdomain_step` or `linear_step`.
        """
        mixer = self.config

        # The step kernel takes [q | k | v] at once: it rotates, and maps by SiLU, the first heads.
        # With a single input (no `dual_input`), k is not mapped.
        rotated = mapped = self.n_heads + self.n_kv_heads
        if not mixer.rope:
            rotated = 0
        if not mixer.dual_input:
            mapped = self.n_heads
        if self.feature_map is not None:
            mapped = 0
        features: dict[str, Any] = dict(rotated=rotated, silu=mapped)

        # Taps [W, E] and biases [E] of the convolutions, side by side: W taps, E channels of all.
        # The call of a convolution returns its weight and its bias.
        weights = []
        biases = []
        for conv in (self.q_conv, self.k_conv, self.v_conv):
            if conv is not None:
                weight, bias = conv()
                weights.append(widened(weight)[:, 0].mT)
                biases.append(widened(bias))
        if weights:
            features["conv"] = torch.cat(weights, dim=1), torch.cat(biases)

        # Weights [R], shared by the heads, and biases [G, R] of the input norms of k and v. The
        # kernel takes [2G, R] of each.
        if self.k_norm is not None and self.v_norm is not None:
            k_weight, k_bias = self.k_norm()
            v_weight, v_bias = self.v_norm()
            k_weight = widened(k_weight).expand(k_bias.shape)
            v_weight = widened(v_weight).expand(v_bias.shape)
            biases = torch.cat([widened(k_bias), widened(v_bias)])
            features["norm"] = torch.cat([k_weight, v_weight]), biases
            features["eps"] = self.k_norm.eps

        # Lambda, and the matrix or vector of the readout.
        log_decay, table = [tensor.detach() for tensor in ssm_tensors]
        tables = dict(log_decay=log_decay, decay=decay_factor(log_decay))
        if not mixer.query_readout:
            tables["readout"] = table
        elif mixer.readout == "complex":
            # The matrix is [[Re, -Im], [Im, Re]]: its lower half has the same numbers.
            tables["mixing"] = table[:, : mixer.n_basis].contiguous()
        else:
            tables["mixing"] = table
        return features, tables

    def _step(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        state: Any,
    ) -> Tensor:
        """Computes one token by the step kernels, which write into the state.

        Args:
            x: [B, 1, dim].
            rope: cos and sin of the rotary angles. None means no rotation.
            state: A `MixerState` with `prepared`.
        Returns:
            The readout, [B, 1, H, D] or [B, 1, G, P].
        """
        # All projections side by side through one kernel: [B, 1, H + 2 G, R] as q, k, v.
        features, tables = state.prepared
        projections = [self.wk(x), self.wv(x)]
        if self.wq is not None:
            projections.insert(0, self.wq(x))
        past = None if self.k_conv is None else state.conv
        y = input_features_step(
            torch.cat(projections, dim=2)[:, 0],
            self.head_dim,
            past=past,
            rope=rope,
            execution=self.execution,
            **features,
        )
        q, k, v = y[:, None].split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=2)
        if self.feature_map is not None and self.config.dual_input:
            k = self.feature_map(k)
        if self.config.normalize:
            v = _with_ones(v)

        # The recurrence and its readout, as in `_sequence`; the state is overwritten.
        if self.wq is None:
            z = torch.cat([k, v], dim=-1)
            return linear_step(z[:, 0], state=state.ssm, **tables)[:, None]
        if self.feature_map is not None:
            q = self.feature_map(q, query=True)
        o = interdomain_step(
            q[:, 0],
            k[:, 0],
            v[:, 0],
            state=state.ssm,
            **tables,
        )[:, None]
        if self.config.normalize:
            o = divided(o, v)
        return o

    # Costs.

    @classmethod
    def state_shapes(cls, config: ModelConfig, ranks: int = 1) -> dict[str, tuple[int, ...]]:
        """Returns the shapes conv [W - 1, E] and ssm [G, M, P, 2] on one of `ranks` ranks."""
        mixer = config.mixer
        kv_dim = config.n_kv_heads * config.head_dim
        channels = 0
        if mixer.conv_width:
            channels = kv_dim if mixer.dual_input else 2 * kv_dim
            if mixer.query_readout:
                channels += config.dim
        width = 2 * config.head_dim + mixer.normalize
        return {
            "conv": (mixer.conv_past, channels // ranks),
            "ssm": (config.n_kv_heads // ranks, mixer.n_basis, width, 2),
        }

    @staticmethod
    def macs(config: ModelConfig, seq_len: int) -> dict[str, int]:
        """Counts the chunkwise passes of docs/kernels.md for the core.

        Args:
            config: Configuration of the layer.
            seq_len: Tokens of a sequence; a chunk is not longer.
        """
        mixer = config.mixer
        H = config.n_heads
        G = config.n_kv_heads
        R = config.head_dim
        D = R + mixer.normalize
        M2 = 2 * mixer.n_basis
        L = min(CHUNK, seq_len)

        # The feature map's products with random vectors of width R.
        linear = 0
        xi = FEATURE_MAPS[mixer.feature_map]
        if xi is not None:
            mapped_heads = H * mixer.query_readout + G * mixer.dual_input
            linear = mapped_heads * R * int(xi.vectors * R)

        if not mixer.query_readout:
            # A Toeplitz product within the chunk; the state's update and readout across chunks.
            core = H * (L * 2 * R + 2 * M2 * 2 * R)
        else:
            # Pass 1: scores, their product with the decay table, and the state's read and update.
            pass1 = H * (L * R + L * M2 + R * M2) + G * R * M2
            # Pass 2: the same from the basis to the values. Between them, the mixing matrix.
            pass2 = H * (L * M2 + L * D + D * M2) + G * D * M2
            core = pass1 + H * M2 * M2 + pass2
        return {"linear": linear, "mixer": core}

    @staticmethod
    def saved_elements(config: ModelConfig) -> tuple[int, int]:
        """Counts the elements per token that autograd keeps, and the scan's scores, [H, 2M]."""
        mixer = config.mixer
        kv_dim = config.n_kv_heads * config.head_dim
        # Keys and values before and after their features, queries likewise, and the output.
        token = 4 * kv_dim + 2 * config.dim
        scores = 0
        if mixer.query_readout:
            token += config.dim
            scores = config.n_heads * 2 * mixer.n_basis
        if mixer.output_norm != "none":
            token += config.dim
        return token, scores

    @classmethod
    def received_elements(
        cls,
        config: ModelConfig,
        context: int,
        tensor: int,
    ) -> tuple[int, int]:
        """Counts two all-to-alls of a share of the state's rows, and one flag for documents.

        Args:
            config: Configuration of the layer.
            context: The number of context-parallel ranks.
            tensor: The number of tensor-parallel ranks.
        """
        G, M, P, _ = cls.state_shapes(config, tensor)["ssm"]
        # Complex numbers, in both all-to-alls. -(-a // b) rounds up.
        rows = -(-G * M // context)
        return (context - 1) * (2 * 2 * rows * P + 1), 0


def _state_after(
    z: Tensor,
    log_decay: Tensor,
    state: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Returns the state X after each row's own tokens, without the padding.

    It is Lambda^n X_0 + sum_j Lambda^(n - 1 - j) z_j for a row of n tokens. The scan's own final
    state has also decayed over the padding behind the tokens.

    Args:
        z: Keys and values side by side, [B, T, G, P].
        log_decay: log Lambda per token, [G, M, 2], as (real, imaginary).
        state: X_0, [B, G, M, P, 2].
        lengths: The number of tokens in each row, [B].
    Returns:
        [B, G, M, P, 2].
    """
    T = z.shape[1]
    t = torch.arange(T, device=z.device)

    # Shift each row so that its tokens come last, after zeros.
    source = t - (T - lengths[:, None])
    shifted = take(z, source.clamp_min(0)).to(log_decay.dtype)
    z = torch.where((source >= 0)[:, :, None, None], shifted, 0)

    # All rows then have the same powers of Lambda. z is real, so the real and the imaginary parts
    # of the powers are summed apart.
    weights = powers(log_decay, T - 1 - t)  # [G, T, M, 2]
    real = torch.einsum("bthp,htm->bhmp", z, weights[..., 0])
    imaginary = torch.einsum("bthp,htm->bhmp", z, weights[..., 1])
    added = torch.stack([real, imaginary], dim=-1)
    passed = powers(log_decay, lengths).transpose(0, 1)[:, :, :, None]  # [B, G, M, 1, 2]
    return multiply(passed, state) + added


def _with_ones(v: Tensor) -> Tensor:
    """Appends the ones channel, whose coefficients are eta of paper eq. 9.

    Args:
        v: Values, [B, T, G, head_dim]. The result has one channel more, D.
    """
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
