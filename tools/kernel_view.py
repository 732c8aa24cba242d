"""interdomain kernel-view --output outputs/kernel-view

Measure the kernel approximation behind the layer, on a CPU.

The first table says how near equation 9 of the paper comes to equation 4, by basis, number of basis functions and
input. The second says which signs the denominators of small models have, before and after training. Tables are printed.
With matplotlib, the first is drawn.

    interdomain kernel-view --tokens 64 --steps 0 --output outputs/kernel-view

Documentation: docs/kernel-view.md
"""

import argparse
import math
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from interdomain.model import MixerConfig, ModelConfig, Transformer
from interdomain.model.initialize import initial_A
from interdomain.model.mixers import interdomain as mixer
from interdomain.scan.legs import legs_projection
from interdomain.tools._cli import argument_parser, user_errors
from interdomain.tools._plots import Curve, Panel, draw

# Shapes: N tokens, M basis functions, R features, d channels of values, Nq queries. float64.

D, QUERIES = 16, 64
SEEDS = range(5)  # errors are medians over them
MAPS = ("silu", "rff", "elu", "softplus", "favor")
READOUTS = ("complex", "hermitian")
BATCH, LENGTH, LR = 8, 128, 3e-3


# Equations


def equation_4(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Kernel regression with features: queries xi(q) [Nq, R], keys xi(k) [N, R], values [N, d] -> [Nq, d]."""
    weights = queries @ keys.T
    return weights @ values / weights.sum(1, keepdim=True)


def equation_9(queries: Tensor, keys: Tensor, values: Tensor, basis: Tensor) -> Tensor:
    """The same through M coefficients, of basis [N, M]: what each token adds to u_m is xi(k_n) basis_nm.

    With complex functions the left factor is conjugated (the mixer's readout `hermitian`).
    """
    keys, values, ones = (x.to(basis.dtype) for x in (keys, values, torch.ones_like(values[:, :1])))
    U, Gamma, eta = basis.T @ keys, basis.T @ values, basis.T @ ones
    left = (queries.to(basis.dtype) @ U.T).conj()
    return (left @ Gamma).real / (left @ eta).real


# Bases, each [N, M]


def s4d(form: str, tokens: int, n_basis: int) -> Tensor:
    """What a recurrence over N tokens with A of `initial_A` leaves of each token, with a step of 1 / N."""
    decay, frequency = initial_A(form, n_basis)
    A = torch.complex(-decay.double().exp(), frequency.double())
    age = torch.arange(tokens - 1, -1, -1) / tokens
    return torch.exp(A * age[:, None]) * (torch.exp(A / tokens) - 1) / A


def orthonormal(basis: Tensor) -> Tensor:
    """An orthonormal basis of the same functions: what a C does to them that inverts their Gram matrix.

    Functions that float64 cannot tell from combinations of the others are left out.
    """
    U, S, _ = torch.linalg.svd(basis, full_matrices=False)
    return U[:, 1e-13 * S[0] < S]


def random(tokens: int, n_basis: int) -> Tensor:
    drawn = torch.randn(tokens, n_basis, dtype=torch.float64, generator=torch.Generator().manual_seed(n_basis))
    return torch.linalg.qr(drawn)[0]


BASES: dict[str, Callable[[int, int], Tensor]] = {
    "LegS, integrals of eq. 6": legs_projection,
    "LegS, orthonormal": lambda N, M: torch.linalg.qr(legs_projection(N, M))[0],
    "S4D-Inv, C = 1": lambda N, M: s4d("s4d-inv", N, M),
    "S4D-Inv, orthonormal": lambda N, M: orthonormal(s4d("s4d-inv", N, M)),
    "S4D-Lin, orthonormal": lambda N, M: orthonormal(s4d("s4d-lin", N, M)),
    "random, orthonormal": random,
}


# Inputs


def smooth(tokens: int, generator: torch.Generator) -> Tensor:
    """Random functions of time, [N, D]: waves of up to five periods, of ever smaller amplitude."""
    time, waves = (torch.arange(tokens, dtype=torch.float64) + 0.5) / tokens, torch.arange(6)
    angles = 2 * math.pi * (time[:, None, None] * waves + torch.rand(D, 6, generator=generator, dtype=torch.float64))
    return (angles.cos() * torch.exp(-((waves / 2.5) ** 2))).sum(-1)


def noise(tokens: int, generator: torch.Generator) -> Tensor:
    return torch.randn(tokens, D, generator=generator, dtype=torch.float64)


def step(tokens: int, generator: torch.Generator) -> Tensor:
    """One value up to a third of the time, another one after it."""
    before, after = torch.randn(2, D, generator=generator, dtype=torch.float64)
    return torch.where(torch.arange(tokens)[:, None] < tokens / 3, before, after)


INPUTS = {
    "smooth keys and values": (smooth, smooth),
    "noise keys, smooth values": (noise, smooth),
    "step in both": (step, step),
    "noise keys and values": (noise, noise),
}


def error(basis: Tensor, kinds: tuple[Callable, Callable], seed: int = 0) -> float:
    """Of equation 9 against equation 4, with features elu + 1: root mean square of the difference over that of the output."""
    generator, N = torch.Generator().manual_seed(seed), len(basis)
    keys, values = (kind(N, generator) for kind in kinds)
    queries = torch.randn(QUERIES, D, generator=generator, dtype=torch.float64)
    args = F.elu(queries) + 1, F.elu(keys) + 1, values
    wanted = equation_4(*args)
    return ((equation_9(*args, basis) - wanted).norm() / wanted.norm()).item()


def errors(tokens: int) -> dict[str, dict[str, dict[int, float]]]:
    """By input, basis and M, which doubles from 1 to N."""
    sizes = [2**i for i in range(int(math.log2(tokens)))] + [tokens]
    found = {name: {basis: {} for basis in BASES} for name in INPUTS}
    for name, make in tqdm(BASES.items(), desc="bases", leave=False):
        for M in sizes:
            basis = make(tokens, M)
            for kind, functions in INPUTS.items():
                several = torch.tensor([error(basis, functions, seed) for seed in SEEDS])
                found[kind][name][M] = several.median().item()
    return found


# Denominators


def share(model: Transformer, tokens: Tensor) -> tuple[float, float]:
    """Of the denominators: how many have the rarer sign of their head, and how many are held (`mixer.divided`)."""
    rarer, held = [], []

    def seen(o: Tensor, v: Tensor) -> Tensor:
        divided, denominator = kept(o, v), o[..., -1:]
        negative = (denominator < 0).double().mean(dim=(0, 1))
        rarer.append(torch.minimum(negative, 1 - negative).mean())
        quotient = (o[..., :-1] / denominator).abs().mean(-1)
        held.append((divided.abs().mean(-1) < 0.999 * quotient).double().mean())
        return divided

    kept = mixer.divided
    with mock.patch.object(mixer, "divided", seen), torch.no_grad():
        model(tokens)
    return torch.stack(rarer).mean().item(), torch.stack(held).mean().item()


def trained(steps: int, **settings) -> list[float]:
    """[the loss in nats per byte over the last tenth of the steps]; where the mixer is normalised, before it (rarer sign, held)
    at the start and after training."""
    sizes = dict(dim=64, n_layers=2, n_heads=4, head_dim=16, vocab_size=256, max_seq_len=LENGTH)
    model = Transformer(ModelConfig(**sizes, mixers=(MixerConfig(n_basis=16, **settings),)))
    model.init_weights(0)
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    corpus, generator = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), torch.Generator().manual_seed(0)

    def batch() -> Tensor:
        starts = torch.randint(len(corpus) - LENGTH, (BATCH, 1), generator=generator)
        return corpus[starts + torch.arange(LENGTH + 1)]

    held_out, losses = batch()[:, :-1], []
    normalized = model.config.mixer.normalize
    start = share(model, held_out) if normalized else ()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for i in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, 10 * (i + 1) / steps)
        tokens = batch()
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]) / (BATCH * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return [*start, *(share(model, held_out) if normalized else ()), sum(last) / len(last)]


# Output


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def error_tables(found: dict[str, dict[str, dict[int, float]]], tokens: int) -> str:
    shown = [M for M in (1, 4, 16, 64) if tokens > M] + [tokens]
    parts = []
    for kind, bases in found.items():
        rows = [[name, *(f"{by_size[M]:.0e}" for M in shown)] for name, by_size in bases.items()]
        parts.append(table([kind, *(f"M = {M}" for M in shown)], rows))
    return "\n\n".join(parts)


def denominator_table(steps: int) -> str:
    rows = [["silu, not normalised", "complex", *"----", f"{trained(steps)[0]:.2f}"]]
    for name, readout in tqdm([(n, r) for n in MAPS for r in READOUTS], desc="models", leave=False):
        *shares, loss = trained(steps, feature_map=name, readout=readout, normalize=True)
        rows.append([name, readout, *(f"{100 * x:.1f} %" for x in shares), f"{loss:.2f}"])
    times = [f"{what}, {when}" for when in ("start", f"step {steps}") for what in ("rarer sign", "held")]
    return table(["feature map", "readout", *times, "loss"], rows)


def parse(argv=None) -> argparse.Namespace:
    parser = argument_parser(__doc__, "--output DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write kernel-view.png to")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens of the first table, at least 2")
    what = "training steps of each model of the second table; 0: leave that table out"
    parser.add_argument("--steps", type=int, default=200, metavar="N", help=what)
    args = parser.parse_args(argv)
    if args.tokens < 2 or args.steps < 0:
        raise ValueError(f"--tokens must be at least 2, --steps at least 0: got {args.tokens} and {args.steps}.")
    return args


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    found = errors(args.tokens)
    print(f"error of equation 9 against equation 4, {args.tokens} tokens\n\n{error_tables(found, args.tokens)}\n")
    if args.steps:
        print(f"denominators of a normalised mixer\n\n{denominator_table(args.steps)}\n")
    panels = [
        Panel(kind, [Curve(name, list(y), list(y.values())) for name, y in bases.items()], "M", "error", True, True)
        for kind, bases in found.items()
    ]
    figure = draw(args.output / "kernel-view.png", panels)
    print(f"wrote {figure}" if figure else "no figure: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
