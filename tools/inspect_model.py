"""interdomain inspect-model exports/debug --text "def main(argv): return main(argv)" --output outputs/inspect

Show attention maps, and what the recurrences learned.

For a text, every layer and head gets an attention map; for a recurrence it is the map that the
recurrence implies. A layer of interdomain attention also gets its pairing: which value a query
reads that matches a key. Every recurrence gets its timescales, the share of its modes at the bound
on the decay, and the scale of its readout. Written are inspect.json (numbers), maps.safetensors
(maps) and pictures, which need matplotlib (the extra train).

    interdomain inspect-model exports/debug --text "$(cat README.md)" --max-tokens 9000 --layers 0

Documentation: docs/evaluation.md
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from interdomain.checkpoint.pretrained import load_pretrained
from interdomain.data import StreamDecoder
from interdomain.folders import new_folder, require_empty
from interdomain.markdown import cell_text, markdown_rows
from interdomain.model import pairing
from interdomain.model.maps import Layer, by_head, read_layers
from interdomain.model.mixers.ssm import BOUND_SHARE, SSM
from interdomain.tools import _cli
from interdomain.tools._maps import draw_maps, draw_pairing

DTYPES = {"float64": torch.float64, "float32": torch.float32}
NOTES = f"""\
error: the largest |map @ v - o|, relative to the largest |o|.
RMS of o: root mean square of what the output projection reads.
own token, distance, spread, negative: of the shares |w_tj| / sum_j |w_tj|, means over queries: the
share of the token itself; how many tokens back; over how many tokens (exp of the entropy); the
share of negative weights. By layer means over heads.
own value: a query matches one key of the last {pairing.LAGS}: the mean weight of that key's value
over the RMS of all weights.
timescale: 1 / |log|Lambda|| in tokens.
at bound: share of modes whose decay the bound reduces by more than {BOUND_SHARE:.0%}."""

Row = dict[str, Any]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = _cli.argument_parser(__doc__, "FOLDER --text TEXT")
    p.add_argument(
        "folder",
        type=_cli.path_argument,
        metavar="FOLDER",
        help=_cli.EXPORTED_MODEL,
    )
    p.add_argument(
        "--text",
        required=True,
        metavar="TEXT",
        help='the text to look at; the text of a file is "$(cat FILE)"',
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


def read_tokens(text: str, max_tokens: int, tokenizer: Any) -> tuple[list[int], list[str]]:
    """Encodes a text as training does, after the tokens that begin a document.

    Args:
        text: The text.
        max_tokens: The most tokens that are allowed.
        tokenizer: The model's.

    Returns:
        The ids, and the text that each completes.

    Raises:
        ValueError: The text is too long or too short.
    """
    # Texts begin as documents did in training.
    start = tokenizer.documents.start
    tokens = tokenizer.encode(text)
    ids = start + tokens
    if not 2 <= len(ids) <= max_tokens:
        raise ValueError(
            f"the text has {len(ids):,} tokens, those that begin it included. "
            f"Allowed are 2 to {max_tokens:,} (--max-tokens)."
        )

    # A label shows line breaks and, for a token that completes no character, a dot.
    decoder = StreamDecoder(tokenizer)
    labels = ["⊢"] * len(start)
    for token in tokens:
        completed = _cli.visible(decoder.push(token)).replace("\n", "⏎")
        labels.append(completed or "·")
    return ids, labels


def layer_row(i: int, layer: Layer, heads: dict[str, list[float]]) -> Row:
    """Makes a row of the table of layers.

    Args:
        i: The number of the layer.
        layer: The layer.
        heads: Figures of its heads by name. The row has their means.
    """
    row = {"layer": i, "mixer": layer.kind, "error": layer.error, "RMS of o": layer.output_rms}
    for name, values in heads.items():
        row[name] = sum(values) / len(values)
    # What a recurrence learned.
    ssm = getattr(layer.mixer, "ssm", None)
    if isinstance(ssm, SSM):
        dynamics = ssm()
        log_abs, bound = dynamics.decay()
        timescales = -1 / log_abs
        row["timescale min"] = timescales.min().item()
        row["timescale median"] = timescales.median().item()
        row["timescale max"] = timescales.max().item()
        row["at bound"] = bound.double().mean().item()
        row["RMS of C"] = dynamics.c_rms().item()
    return row


def table(rows: list[Row]) -> list[str]:
    """Returns the lines of a table in Markdown. A row may lack columns that others have.

    Args:
        rows: The value of each column.
    """
    # The columns of all rows, in the order in which they come.
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    cells = [list(names)]
    for row in rows:
        cells.append([cell_text(row.get(name)) for name in names])
    return markdown_rows(cells)


@_cli.user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    require_empty(args.output)
    # The pictures need it. If it is missing, that is said before the work.
    import matplotlib.figure  # noqa: F401

    # The model, the layers to look at, and the text.
    device = _cli.choose_device(args.device)
    model, tokenizer = load_pretrained(args.folder, device=device, dtype=DTYPES[args.dtype])
    n_layers = model.config.n_layers
    numbers = args.layers or list(range(n_layers))
    for i in numbers:
        if not 0 <= i < n_layers:
            raise ValueError(f"--layers must be from 0 to {n_layers - 1}: got {i}.")
    _cli.note_documents(args.folder, tokenizer)
    ids, labels = read_tokens(args.text, args.max_tokens, tokenizer)
    layers = read_layers(model, torch.tensor(ids, device=device), numbers)

    # Numbers by layer and by head, maps and pictures.
    rows: list[Row] = []
    head_rows: list[Row] = []
    notes: list[str] = []
    maps: dict[str, Tensor] = {}
    # The folder appears when all files are in it.
    with new_folder(args.output) as folder:
        for i, layer in layers.items():
            heads: dict[str, list[float]] = {}
            title = f"layer {i} ({layer.kind})"
            if layer.weights is None:
                notes.append(f"{title}: no map for this mixer.")
            else:
                heads = by_head(layer.weights)
                maps[f"layer-{i:02d}"] = layer.weights.float().contiguous()
                draw_maps(folder / f"map-layer-{i:02d}.png", title, layer.weights, labels)
                if layer.pairing is not None:
                    sharing = len(layer.weights) // len(layer.pairing)  # heads that share a state
                    heads |= pairing.by_head(layer.pairing.repeat_interleave(sharing, 0))
                    maps[f"pairing-{i:02d}"] = layer.pairing.float().contiguous()
                    draw_pairing(folder / f"pairing-layer-{i:02d}.png", title, layer.pairing)
            for head, figures in enumerate(zip(*heads.values(), strict=True)):
                head_row = dict(zip(heads, figures, strict=True))
                head_rows.append({"layer": i, "head": head, **head_row})
            rows.append(layer_row(i, layer, heads))
        contents = {
            "folder": str(args.folder),
            "dtype": args.dtype,
            "tokens": ids,
            "text": labels,
            "layers": rows,
            "heads": head_rows,
        }
        numbers_file = json.dumps(contents, indent=1, ensure_ascii=False)
        (folder / "inspect.json").write_text(f"{numbers_file}\n")
        save_file(maps, folder / "maps.safetensors")
    print(f"{args.folder}: {len(ids)} tokens, computed in {args.dtype}\n")
    print("\n".join([*table(rows), "", NOTES, *notes]))
    print(f"wrote {args.output}: inspect.json, maps.safetensors, pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
