"""The interdomain mixer and its ablations: three switches around one recurrence (paper, figure 3)."""

from typing import NamedTuple

import torch
from torch import Tensor

from interdomain.features import input_features, input_features_step
from interdomain.scan import decay_factor, interdomain_scan, interdomain_step, linear_scan, linear_step

from .config import Execution, ModelConfig
from .feature_map import InputNorm, RandomFourierFeatures, ShortConv, widened
from .initialize import initialize
from .joined import JoinedProjections
from .layers import Linear
from .ssm import SSMDynamics, fold
from .state import MixerState, ModelState, writable

# Shapes: B batch, T time, H query heads, G heads of keys and state, R key features, D value width (R = D = head_dim),
#         M basis functions, W convolution width, E channels.


class StepTables(NamedTuple):
    """What a step reads of a mixer's parameters, as it reads them (`input_features_step`, `interdomain_step`).

    readout: W, its upper half where that is all of it, or w.
    conv: ([W, E], [E]). norm: ([2 G, R], [2 G, R]), or None.
    """

    log_decay: Tensor
    decay: Tensor
    readout: Tensor
    conv: tuple[Tensor, Tensor]
    norm: tuple[Tensor, Tensor] | None


class InterdomainMixer(JoinedProjections):
    """o_t = Re(q_t^T U_t^T Gamma_t) over a state of fixed size (paper eq. 13), or the linear readout of s4d.

    With a single input, the projections a and b of the paper take the places (and names) of k and v.
    """

    together = ("wq", "wk", "wv")

    def __init__(self, config: ModelConfig, execution: Execution | None = None) -> None:
        super().__init__()
        mixer = config.mixer
        self.config = mixer
        self.execution = execution or Execution()
        self.head_dim = config.head_dim
        self.n_heads = config.n_heads if mixer.query_readout else 0
        self.n_kv_heads = config.n_kv_heads
        kv_dim = config.n_kv_heads * config.head_dim
        out_dim = config.dim if mixer.query_readout else 2 * config.dim

        if mixer.query_readout:
            self.wq = Linear(config.dim, config.dim)
            self.q_conv = ShortConv(config.dim, mixer.conv_width)
        self.wk = Linear(config.dim, kv_dim)
        self.k_conv = ShortConv(kv_dim, mixer.conv_width)
        self.wv = Linear(config.dim, kv_dim)
        if not mixer.dual_input:
            self.v_conv = ShortConv(kv_dim, mixer.conv_width)

        rff = mixer.feature_map == "rff"
        self.feature_map = RandomFourierFeatures(self.n_kv_heads, self.head_dim) if rff else None
        # Random Fourier features keep their scale, which estimates a kernel: no input norm (paper, recurrent projection).
        self.k_norm = None if rff else InputNorm(self.n_kv_heads, self.head_dim, config.norm_eps)
        self.v_norm = None if rff else InputNorm(self.n_kv_heads, self.head_dim, config.norm_eps)

        self.ssm = SSMDynamics(
            self.n_kv_heads,
            mixer.n_basis,
            c_form=mixer.c_form,
            linear=not mixer.query_readout,
        )
        self.wg = Linear(config.dim, out_dim) if mixer.output_gate else None
        self.wo = Linear(out_dim, config.dim)
        initialize(self, config)

    @staticmethod
    def dynamics(mixers: "list[InterdomainMixer]") -> list[tuple[Tensor, Tensor]]:
        """Of each, (log_decay, mixing or readout), float32: constant over the sequence, so computed once per forward."""
        return fold([mixer.ssm() for mixer in mixers], mixers[0].config.readout)

    def init_state(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device, dynamics: tuple[Tensor, Tensor]
    ) -> MixerState:
        width = 2 * self.head_dim + self.config.normalize
        shape = batch, self.n_kv_heads, self.config.n_basis, width, 2
        step = self._step_tables(*dynamics)
        return MixerState(
            conv=torch.zeros(batch, self.config.conv_width - 1, len(step.conv[1]), dtype=dtype, device=device),
            ssm=torch.zeros(shape, dtype=self.ssm.log_dt.dtype, device=device),
            step=step,
        )

    def _convolutions(self) -> dict[str, ShortConv]:
        """In the order of their channels in a state."""
        return {name: self._modules[f"{name}_conv"] for name in "qkv" if f"{name}_conv" in self._modules}

    @torch.no_grad()
    def _step_tables(self, log_decay: Tensor, readout: Tensor) -> StepTables:
        log_decay, readout = log_decay.detach(), readout.detach()
        if self.config.query_readout and self.config.readout == "complex":
            readout = readout[:, : self.config.n_basis].contiguous()
        convs = self._convolutions().values()
        norm = None
        if self.k_norm is not None:
            norms = self.k_norm, self.v_norm
            scale = torch.cat([widened(n.weight).expand(n.bias.shape) for n in norms])
            norm = scale, torch.cat([widened(n.bias) for n in norms])
        return StepTables(
            log_decay,
            decay_factor(log_decay),
            readout,
            conv=(
                torch.cat([widened(c.weight)[:, 0].mT for c in convs], dim=1),
                torch.cat([widened(c.bias) for c in convs]),
            ),
            norm=norm,
        )

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        dynamics: tuple[Tensor, Tensor] | None = None,
        state: MixerState | None = None,
        packing: Tensor | None = None,
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; with a state, continues from it and advances it past the last token."""
        recorded = torch.is_grad_enabled() or state is None or not writable(state.ssm, state.ssm)
        if x.shape[1] == 1 and packing is None and not recorded:
            o = self._step(x[:, 0], rope, state)[:, None]
        else:
            o = self._whole(x, rope, self.dynamics([self])[0] if dynamics is None else dynamics, state, packing)
        if self.config.normalize:
            o = _divided(o).to(o.dtype)

        o = o.flatten(2)  # [B, T, H * D], or [B, T, H * (R + D)] for the linear readout
        if self.wg is not None:
            o = torch.sigmoid(self.wg(x)) * o
        return self.wo(o)

    def _step(self, x: Tensor, rope: tuple[Tensor, Tensor], state: MixerState) -> Tensor:
        """One token where nothing is recorded, x [B, dim] -> [B, H, D]: few operations, the state written in place."""
        mixer, q_heads, heads = self.config, self.n_heads, self.n_kv_heads
        mapped = q_heads + heads * mixer.dual_input
        x, rope = self.project(x), rope if mixer.rope else None
        chosen = dict(
            conv=state.step.conv,
            past=state.conv,
            rotated=q_heads + heads if mixer.rope else 0,
            silu=mapped if self.feature_map is None else 0,
            norm=state.step.norm,
            eps=1e-5 if self.k_norm is None else self.k_norm.eps,
        )
        y = input_features_step(x, self.head_dim, rope=rope, backend=self.execution.features, **chosen)
        if self.feature_map is not None:
            self._map(y, mapped)
        q, k, v = y.split([q_heads, heads, heads], dim=1)
        if mixer.normalize:
            v = _with_ones(v)
        token = (q, k, v) if mixer.query_readout else (torch.cat([k, v], dim=-1),)
        run, step = interdomain_step if mixer.query_readout else linear_step, state.step
        return run(*token, step.log_decay, step.readout, state.ssm, decay=step.decay, inplace=True)[0]

    def _map(self, y: Tensor, mapped: int) -> None:
        for part in (y[:, : self.n_heads], y[:, self.n_heads : mapped]):
            part.copy_(self.feature_map(part[:, None])[:, 0])

    def _whole(self, x, rope, dynamics, state, documents) -> Tensor:
        """Any number of tokens, x [B, T, dim] -> [B, T, H, D]."""
        past = {}
        if state is not None:
            convs = self._convolutions()
            widths = [len(conv.bias) for conv in convs.values()]
            past = dict(zip(convs, state.conv.split(widths, dim=2), strict=True))
        k, v, conv = self._inputs(x, rope, past, documents)
        q = None
        if self.config.query_readout:
            q = self._features("q", x, past, conv, documents, rope=rope, mapped=True)
        o, final = self._scan(q, k, v, *dynamics, None if state is None else state.ssm, documents)
        if state is not None:
            state.advance(torch.cat([conv[name] for name in past], dim=2), final)
        return o

    @staticmethod
    def packing(documents: Tensor, dtype: torch.dtype) -> Tensor:
        """What the mixer needs to know of packed documents: the number of each token's, [B, T] int32."""
        return documents

    @staticmethod
    def continuing(state: ModelState, tokens: int, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The same for a piece that continues from a state: left padding is a document before the text's."""
        if padding is None:
            return None
        after = torch.arange(tokens, device=padding.device) >= padding[:, None]
        return (after & (padding[:, None] > 0)).int()

    def _inputs(
        self, x: Tensor, rope: tuple[Tensor, Tensor], past: dict[str, Tensor], documents: Tensor | None
    ) -> tuple[Tensor, Tensor, dict]:
        """The two halves of z, k and v (dual input) or the paper's a and b, each [B, T, G, R]; and their `conv` of a state."""
        conv = {}
        k = self._features("k", x, past, conv, documents, rope=rope, mapped=self.config.dual_input, norm=self.k_norm)
        v = self._features("v", x, past, conv, documents, norm=self.v_norm)
        if self.config.normalize:
            v = _with_ones(v)
        return k, v, conv

    def _features(
        self,
        name: str,
        x: Tensor,
        past: dict[str, Tensor],
        conv: dict[str, Tensor],
        documents: Tensor | None,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        mapped: bool = False,
        norm: InputNorm | None = None,
    ) -> Tensor:
        """Projection, convolution if `name` has one, RoPE, feature map if `mapped`, norm: [B, T, H, R].

        With a past, its convolution's last inputs are written to `conv`.
        """
        x = getattr(self, f"w{name}")(x)
        short, before = getattr(self, f"{name}_conv", None), past.get(name)
        if before is not None:
            conv[name] = short.last_inputs(x, before)
        y = input_features(
            x,
            self.head_dim,
            conv=None if short is None else (short.weight, short.bias),
            past=before,
            documents=None if short is None else documents,
            check_documents=False,  # counted (`Transformer._packed`), or 0 and 1 (`continuing`)
            rope=rope if self.config.rope else None,
            silu=mapped and self.feature_map is None,
            norm=None if norm is None else (norm.weight, norm.bias),
            eps=1e-5 if norm is None else norm.eps,
            backend=self.execution.features,
        )
        return self.feature_map(y) if mapped and self.feature_map is not None else y

    def _scan(self, q, k, v, log_decay, readout, initial, documents):
        wanted = initial is not None  # in training no state goes on
        run = dict(initial_state=initial, documents=documents, final_state=wanted, backend=self.execution.backend)
        run["check_documents"] = False
        if q is None:
            return linear_scan(torch.cat([k, v], dim=-1), log_decay, readout, **run)
        return interdomain_scan(q, k, v, log_decay, readout, recompute=self.execution.recompute is not False, **run)


def _with_ones(v: Tensor) -> Tensor:
    """v with the ones channel: its coefficients are eta of paper eq. 9."""
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


def _divided(o: Tensor, eps: float = 1e-6) -> Tensor:
    """Numerator over the Nadaraya-Watson denominator, the last channel of o, which is kept away from zero."""
    numerator, denominator = widened(o[..., :-1]), widened(o[..., -1:])
    sign = torch.where(denominator < 0, -1.0, 1.0)
    return numerator / (sign * denominator.abs().clamp_min(eps))
