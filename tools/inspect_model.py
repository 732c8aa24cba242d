"""interdomain inspect-model exports/debug --text "def main(argv): return main(argv)" --output outputs/inspect

Show attention maps, and what the recurrences learned.

For a text, every layer and head gets an attention map; for a recurrence it is the map that the recurrence implies.
A layer of interdomain attention also gets its pairing: which value a query reads that matches a key.
Every recurrence gets its timescales, the share of its modes at the bound on the decay, and the scale of its readout.
Written are inspect.json and inspect.md (numbers) and maps.safetensors (maps). With matplotlib there are pictures too.

    interdomain inspect-model exports/debug --text "$(cat README.md)" --max-tokens 9000 --layers 0

Documentation: docs/inspect.md
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from interdomain.checkpoint.pretrained import load_pretrained
from interdomain.data import StreamDecoder
from interdomain.folders import new_folder, require_empty
from interdomain.markdown import cell_text, markdown_rows
from interdomain.model import pairing
from interdomain.model.maps import Layer, by_head, read_layers
from interdomain.model.mixers.ssm import BINDS, SSMDynamics
from interdomain.tools import _cli
from interdomain.tools._maps import draw_maps, draw_pairing

DTYPES = {"float64": torch.float64, "float32": torch.float32}
NOTES = f"""\
error: the largest |map @ v - o|, relative to the largest |o|. RMS of o: of what the output projection reads, for this text.
own token, distance, spread, negative: of the shares |w_tj| / sum_j |w_tj|, means over queries: the share of the token itself;
how many tokens back; over how many tokens (exp of the entropy); the share of negative weights. By layer means over heads.
own value: a query matches one key of the last {pairing.LAGS}: the mean weight of that key's value over the RMS of all weights.
timescale: 1 / |log|Lambda|| in tokens. at bound: share of modes whose decay the bound reduces by more than {BINDS:.0%}."""


def parse(argv) -> argparse.Namespace:
    p = _cli.argument_parser(__doc__, "FOLDER --text TEXT")
    p.add_argument(
        "folder",
        type=_cli.path_argument,
        metavar="FOLDER",
        help=_cli.STANDALONE,
    )
    p.add_argument(
        "--text",
        required=True,
        metavar="TEXT",
        help='the text to look at; of a file: "$(cat FILE)"',
    )
    p.add_argument(
        "--output",
        type=_cli.path_argument,
        default=Path("outputs/inspect"),
        metavar="DIR",
        help=_cli.OUTPUT,
    )
    p.add_argument(
        "--layers",
        nargs="+",
        type=int,
        metavar="N",
        help="only these, counted from 0 (default: all)",
    )
    p.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        metavar="N",
        help="longest text in tokens; longer ones are refused. A map of T tokens has T x T numbers",
    )
    _cli.add_device(p)
    p.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float64",
        help="data type to compute in",
    )
    return p.parse_args(argv)


def tokens_of(args: argparse.Namespace, tokenizer) -> tuple[list[int], list[str]]:
    """Token ids, after those that begin a text as in training, and the text that each completes. Raises: ValueError."""
    _cli.require_at_least(args, max_tokens=2)
    start = tokenizer.documents.start
    tokens = tokenizer.encode(args.text)
    ids = start + tokens
    if not 1 < len(ids) <= args.max_tokens:
        raise ValueError(
            f"the text has {len(ids):,} tokens, those that begin it included. Allowed are 2 to {args.max_tokens:,} "
            f"(--max-tokens). A map takes {8 * len(ids) ** 2 / 1e6:,.0f} MB per head."
        )
    decoder = StreamDecoder(tokenizer)
    labels = ["⊢"] * len(start)
    for token in tokens:
        labels.append(_cli.visible(decoder.push(token)).replace("\n", "⏎") or "·")
    return ids, labels


def layer_row(i: int, layer: Layer, heads: dict[str, list[float]]) -> dict:
    """A row of the table of layers."""
    row = {"layer": i, "mixer": layer.kind, "error": layer.error, "RMS of o": layer.output_rms}
    for name, values in heads.items():
        row[name] = sum(values) / len(values)
    ssm = getattr(layer.mixer, "ssm", None)
    if isinstance(ssm, SSMDynamics):
        dynamics = ssm()
        log_abs, bound = dynamics.decay()
        timescales = -1 / log_abs
        row["timescale min"] = timescales.min().item()
        row["timescale median"] = timescales.median().item()
        row["timescale max"] = timescales.max().item()
        row["at bound"] = bound.double().mean().item()
        row["RMS of C"] = dynamics.c_rms().item()
    return row


def table(rows: list[dict]) -> list[str]:
    """Markdown; `-` where a row lacks what another has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names]
    for row in rows:
        cells.append([cell_text(row.get(name)) for name in names])
    return markdown_rows(cells)


def draw(folder: Path, layers: dict[int, Layer], labels: list[str]) -> int:
    """The number of pictures; 0 without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return 0
    for i, layer in layers.items():
        title = f"layer {i} ({layer.kind})"
        if layer.weights is not None:
            draw_maps(folder / f"map-layer-{i:02d}.png", title, layer.weights, labels)
        if layer.pairing is not None:
            draw_pairing(folder / f"pairing-layer-{i:02d}.png", title, layer.pairing)
    return len(list(folder.glob("*.png")))


@_cli.user_errors
def main(argv=None) -> int:
    args = parse(argv)
    require_empty(args.output)
    model, tokenizer = load_pretrained(
        args.folder, device=_cli.choose_device(args.device), dtype=DTYPES[args.dtype]
    )
    n_layers = model.config.n_layers
    wanted = args.layers or list(range(n_layers))
    if not all(0 <= i < n_layers for i in wanted):
        raise ValueError(
            f"--layers must be from 0 to {n_layers - 1}: got {' '.join(map(str, wanted))}."
        )
    _cli.note_documents(args.folder, tokenizer)
    ids, labels = tokens_of(args, tokenizer)
    layers = read_layers(
        model, torch.tensor(ids, device=model.tok_embeddings.weight.device), wanted
    )

    # Numbers by layer and by head.
    rows = []
    head_rows = []
    notes = []
    maps = {}
    for i, layer in layers.items():
        heads = {}
        if layer.weights is None:
            notes.append(f"layer {i}: no map for this mixer ({layer.kind}).")
        else:
            heads = by_head(layer.weights)
            maps[f"layer-{i:02d}"] = layer.weights.float().contiguous()
            if layer.pairing is not None:
                maps[f"pairing-{i:02d}"] = layer.pairing.float().contiguous()
                sharing = len(layer.weights) // len(layer.pairing)  # heads that share a state
                heads |= pairing.by_head(layer.pairing.repeat_interleave(sharing, 0))
            for head in range(len(layer.weights)):
                head_rows.append(
                    {"layer": i, "head": head}
                    | {name: values[head] for name, values in heads.items()}
                )
        rows.append(layer_row(i, layer, heads))

    page = [
        f"{args.folder}: {len(ids)} tokens, computed in {args.dtype}",
        "",
        *table(rows),
        "",
        NOTES,
        *notes,
    ]
    contents = {
        "folder": str(args.folder),
        "dtype": args.dtype,
        "tokens": ids,
        "text": labels,
        "layers": rows,
        "heads": head_rows,
    }
    with new_folder(args.output) as folder:
        (folder / "inspect.json").write_text(
            json.dumps(contents, indent=1, ensure_ascii=False) + "\n"
        )
        (folder / "inspect.md").write_text("\n".join([*page, "", *table(head_rows or [{}]), ""]))
        save_file(maps, folder / "maps.safetensors")
        drawn = draw(folder, layers, labels)
    print("\n".join(page))
    pictures = f"{drawn} pictures" if drawn else "no pictures: matplotlib is not installed"
    print(f"wrote {args.output}: inspect.json, inspect.md, maps.safetensors, {pictures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
