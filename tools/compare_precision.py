"""python -m interdomain.tools.compare_precision --output benchmarks/results/today

How far the gradients of each precision are from float32's: a small model reads the bytes of Python's standard library, trains a
while in float32, and from the same weights the gradients of the next batch are computed in every precision, over several seeds.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Iterator

import torch

from interdomain.data.readers import read_documents
from interdomain.model import CONDITIONS, Execution, Transformer, build_config
from interdomain.model.config import PRECISIONS
from interdomain.model.initialize import clean_name

from . import _bench
from ._cli import argument_parser, user_errors

GROUPS = ("dynamics", "other parameters", "all")
BYTES = 4_000_000  # of text
BATCH, LENGTH, LR = 8, 256, 1e-3  # sequences, bytes of each
COMPARED = PRECISIONS[:-1]  # with the last, float32


def read_text() -> torch.Tensor:
    """[N] bytes."""
    text = bytearray()
    for document in read_documents(["stdlib"]):
        text += document.encode()
        if len(text) >= BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batches(text: torch.Tensor, seed: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Without end, (tokens, labels), each [BATCH, LENGTH]."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=draw)
        rows = text[starts + torch.arange(LENGTH + 1)].to(device)
        yield rows[:, :-1], rows[:, 1:]


def train(model: Transformer, data: Iterator, steps: int) -> None:
    """AdamW in float32, warmed up over a tenth of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / max(1, steps // 10))
        tokens, labels = next(data)
        optimizer.zero_grad()
        (model(tokens, labels=labels) / labels.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def in_precision(model: Transformer, precision: str) -> Transformer:
    """A copy that computes as training in `precision` does."""
    execution = Execution(bf16_products=precision == "bf16-products")
    other = Transformer(model.config, execution).to(next(model.parameters()).device)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    return other.to(torch.bfloat16) if precision == "bf16" else other


def gradients(model: Transformer, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    (model(tokens, labels=labels) / labels.numel()).backward()
    return {clean_name(name): p.grad.double() for name, p in model.named_parameters()}


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm, by group and of all; a model without dynamics has none of these."""
    dynamics = [name for name in exact if ".ssm." in name]
    members = dict(zip(GROUPS, (dynamics, [name for name in exact if name not in dynamics], exact), strict=True))

    def norm(tensors) -> float:
        return sum(x.square().sum().item() for x in tensors) ** 0.5

    return {
        group: norm(found[n] - exact[n] for n in names) / norm(exact[n] for n in names)
        for group, names in members.items()
        if names
    }


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    _bench.add_arguments(p)
    p.add_argument("--conditions", nargs="+", choices=tuple(CONDITIONS), default=["interdomain", "softmax"])
    p.add_argument("--seeds", nargs="+", type=int, default=[42, 1, 2], help="of weights and batches; default 42 1 2")
    p.add_argument("--steps", type=int, default=200, help="trained before; default %(default)s")
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    device, deadline, text = _bench.choose_device(args.device), _bench.Deadline(args.time_limit), read_text()
    options = {"conditions": args.conditions, "seeds": args.seeds, "steps": args.steps}
    report = _bench.Report("precision", args.output, device, options, f"computed on {device.type.upper()}")
    report.note("Norm of the difference to the float32 gradient over its norm, mean (least to most) over the seeds.")
    for condition in args.conditions:
        config, seen = build_config("debug", condition, vocab_size=256, max_seq_len=LENGTH), {}
        for seed in args.seeds:
            if deadline.passed:
                break
            model = Transformer(config)
            model.init_weights(seed)
            data = batches(text, seed, device)
            train(model.to(device), data, args.steps)
            batch = next(data)
            exact = gradients(in_precision(model, "float32"), *batch)
            for precision in COMPARED:
                for group, error in errors(gradients(in_precision(model, precision), *batch), exact).items():
                    seen.setdefault(group, {}).setdefault(precision, []).append(100 * error)
        table = f"{condition}: error of the gradient in %"
        report.table(table, ["parameters", *COMPARED])
        for group in seen:
            cells = {p: f"{statistics.mean(x):.2f} ({min(x):.2f} to {max(x):.2f})" for p, x in seen[group].items()}
            report.add(table, {"parameters": group, **cells, "each": seen[group]})
    report.finish("unfinished" if deadline.passed else "complete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
