"""interdomain evaluate exports/softmax exports/interdomain --tasks paper

Evaluate standalone folders on tasks and by perplexity.

Several folders stand side by side in one table. Tasks are those of lm-evaluation-harness (default: the paper's).
--perplexity measures perplexity against context length. evaluation.json and evaluation.md are written after every
task and folder, with machine and versions. With matplotlib, perplexity is drawn too. Tasks and the paper's corpora
come from the Hugging Face hub: use --fetch once where there is a network.

    interdomain evaluate --fetch --tasks paper --perplexity paper
    interdomain evaluate exports/debug --perplexity README.md --packed --lengths 256 512 --limit 4

Documentation: docs/evaluation.md; for --perplexity docs/length.md
"""

import argparse
import datetime
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interdomain.data import Tokenizer
from interdomain.data.readers import find_inputs, list_spans
from interdomain.environment import versions
from interdomain.files.pretrained import (
    CONFIG,
    DTYPES,
    check_weights,
    load_checked_tokenizer,
    load_model,
    read_config,
)
from interdomain.folders import write_whole
from interdomain.model import ModelConfig, cell_of, count_parameters, meta_model
from interdomain.tools import _cli
from interdomain.tools._bench import results
from interdomain.tools._bench.pages import page
from interdomain.tools._bench.timing import release
from interdomain.tools._evaluate import harness, perplexity, task_table
from interdomain.tools._evaluate import length as _length
from interdomain.tools._plots import Curve, Panel, draw

MARKDOWN, PLOT = "evaluation.md", "perplexity.png"
RECORDED = ("batch_size", "dtype", "limit", "perplexity", "lengths", "packed")  # of the options
PACKAGES = ("lm_eval", "transformers", "accelerate", "datasets")


def parse(argv) -> argparse.Namespace:
    p = _cli.argument_parser(__doc__, "FOLDER [FOLDER ...]")
    p.add_argument(
        "folders", nargs="*", type=_cli.path_or_name, metavar="FOLDER", help=f"{_cli.STANDALONE}; before all options"
    )
    p.add_argument(
        "--output", type=_cli.path_argument, metavar="DIR", help=f"{_cli.RESULTS} (default: outputs/evaluations/TIME)"
    )
    p.add_argument("--fetch", action="store_true", help="fetch the data from the hub, and stop; no FOLDER is needed")
    add_options(p)
    return p.parse_args(argv)


def add_options(p: argparse.ArgumentParser) -> None:
    """Options that say what is measured, and how: those of `check_options`, `corpora_of` and `read_data`."""
    _cli.add_device(p)
    _cli.add_dtype(p, DTYPES)
    p.add_argument("--batch-size", type=int, default=8, metavar="N", help="texts or windows at once, at least 1")
    text = "for a trial: only N samples of each task, and N windows (of the longest length) of each corpus"
    p.add_argument("--limit", type=int, metavar="N", help=text)
    tasks = p.add_argument_group("tasks (need the extra `eval`: docs/evaluation.md)")
    text = f"suites ({', '.join(task_table.SUITES)}) or names of lm-evaluation-harness (default: paper, or none with "
    tasks.add_argument("--tasks", nargs="+", metavar="NAME", help=f"{text}--perplexity)")
    text = "folders with task files of your own, in the harness's format"
    tasks.add_argument("--include-path", nargs="+", type=_cli.path_argument, default=[], metavar="DIR", help=text)
    text = "tokens that a model sees at most (default: the shortest length that one of the folders was trained at)"
    tasks.add_argument("--max-length", type=int, metavar="N", help=text)
    windows = p.add_argument_group("perplexity against context length")
    text = "corpora: text files (.txt, .md, .jsonl, .parquet, ...), each a file, a folder or a quoted glob; or `paper`, alone"
    windows.add_argument("--perplexity", nargs="+", type=_cli.path_or_name, default=[], metavar="CORPUS", help=text)
    text = "context lengths in tokens, each at least 1"
    windows.add_argument("--lengths", nargs="+", type=int, default=[*_length.LENGTHS], metavar="N", help=text)
    text = "join the documents of a corpus; without it, documents shorter than the longest length are left out"
    windows.add_argument("--packed", action="store_true", help=text)
    text = "where --fetch puts the corpora of `paper`"
    windows.add_argument("--corpora", type=_cli.path_argument, default=Path("data/length"), metavar="DIR", help=text)
    windows.add_argument("--text-field", default="text", metavar="NAME", help="column or JSON field of the text")


def check_options(args) -> list[str]:
    """The names of --tasks, its default filled in, after a check of what can be seen without any data. Raises: ValueError."""
    if args.tasks is None:
        args.tasks = [] if args.perplexity else ["paper"]
    if names := task_table.task_names(args.tasks):
        harness.require_harness()
    if _length.NAME in args.perplexity and len(args.perplexity) > 1:
        raise ValueError(f"--perplexity {_length.NAME} stands alone. Evaluate other corpora with a second command.")
    _cli.require_at_least(args, batch_size=1, lengths=1, limit=1, max_length=1)
    if args.max_length is not None and not names:
        raise ValueError("--max-length is of --tasks, and there are none; the lengths of --perplexity are --lengths.")
    return names


def corpora_of(args) -> tuple[dict[str, str], dict]:
    """({corpus: its files}, the record of the paper's corpora if it is these) of --perplexity.

    Raises: ValueError, FileNotFoundError for what can be seen without reading it all.
    """
    if _length.NAME in args.perplexity:
        record, args.packed, args.text_field = _length.read_record(args.corpora), True, "text"
        return {name: str(args.corpora / f"{name}.jsonl") for name in record}, record
    corpora = {name: name for name in args.perplexity}
    if corpora:
        list(list_spans(find_inputs(corpora).files, args.text_field))
    return corpora, {}


def read_data(args, names: list[str], corpora: dict[str, str], tokenizer: Tokenizer) -> tuple[dict, dict]:
    """({task: it with its data}, {corpus: its spans}) for a tokenizer, on which both depend. Raises: as `load_tasks` and
    `read_spans`."""
    tasks = harness.load_tasks(args.tasks, args.include_path, tokenizer) if names else {}
    cut: dict[str, Any] = dict(text_field=args.text_field, packed=args.packed, limit=args.limit)
    longest = max(args.lengths)
    return tasks, {c: perplexity.read_spans(path, tokenizer, longest, **cut) for c, path in corpora.items()}


@dataclass(frozen=True)
class Folder:
    """A standalone folder before its weights are read."""

    path: Path
    config: ModelConfig
    record: dict
    tokenizer: Tokenizer

    @property
    def data_key(self) -> tuple:
        """Equal for folders that read the same tokens."""
        return self.tokenizer.sha256, self.tokenizer.documents

    def facts(self) -> dict:
        facts = self.record.get("facts", {})
        return {
            **cell_of(self.config, facts.get("size", "unknown"))._asdict(),
            "parameters": count_parameters(meta_model(self.config)),
            "stored as": self.record.get("dtype"),
            "step": facts.get("step"),
            "trained tokens": facts.get("tokens"),
            "validation perplexity": (facts.get("validation") or {}).get("perplexity"),
            "trained at length": self.config.max_seq_len,
            "tokenizer": self.tokenizer.sha256[:16],
            "texts begin with": self.tokenizer.documents.start,
            # config.json holds the checksums of the weights.
            CONFIG: hashlib.sha256((self.path / CONFIG).read_bytes()).hexdigest()[:16],
        }


def open_folder(folder: str) -> Folder:
    """Raises: FileNotFoundError, ValueError for a folder that is none, not whole, or not as it was written."""
    path = Path(folder)
    config, record = read_config(path)
    opened = Folder(path, config, record, load_checked_tokenizer(path, config, record))
    check_weights(path, record)
    return opened


def save(report: results.Report) -> None:
    """JSON and Markdown, with the tables of what is known so far."""
    contents, folders, cells = report.contents, report.rows("folders"), {}
    if contents["tasks"]:
        by_label = {label: out["results"] for label, out in contents["tasks"].items()}
        cells["tasks"] = task_table.table(by_label, {(row["size"], row["condition"]) for row in folders})
    if contents["perplexity"]:
        beside = {row["condition"] for row in folders if row["size"] == _length.SIZE and "corpora" in contents}
        table = perplexity_table(contents["perplexity"], [row["folder"] for row in folders], beside)
        cells["perplexity by context length"] = table
    for name, (head, *rows) in cells.items():
        report.table(name, head)
        report.rows(name).extend(dict(zip(head, row, strict=True)) for row in rows)
    report.write()
    write_whole(report.folder / MARKDOWN, "\n".join([*page(contents), ""]).encode())


def perplexity_table(measured: list[dict], names: list[str], beside: set[str]) -> list[list[str]]:
    """Corpora and lengths down, folders across; below, arithmetic means over corpora where there are several.

    beside: conditions whose figures from the paper get a column. Of the paper's corpora, the mean is over its five.
    """
    corpora, lengths = (list(dict.fromkeys(row[key] for row in measured)) for key in ("corpus", "length"))
    groups = {corpus: [corpus] for corpus in corpora}
    if corpora == [*_length.CORPORA]:
        groups[_length.MEAN] = _length.IN_MEAN
    elif len(corpora) > 1:
        groups[f"mean of {len(corpora)}"] = corpora
    columns = [(name, "perplexity", ".2f") for name in names] + [(name, "bits per byte", ".4f") for name in names]
    theirs = [condition for condition in _length.CONDITIONS if condition in beside]
    head = [*(f"{name}, {kind}" for name, kind, _ in columns), *(f"paper's {_length.SIZE} {name}" for name in theirs)]
    table = [["corpus", "length", *head]]
    rows = {(row["folder"], row["corpus"], row["length"]): row for row in measured}
    for title, group in groups.items():
        for length in lengths:
            cells = []
            for name, kind, digits in columns:
                values: list[Any] = [rows.get((name, corpus, length), {}).get(kind) for corpus in group]
                cells.append("-" if None in values else f"{sum(values) / len(values):{digits}}")
            for condition in theirs:
                paper = dict(zip(_length.LENGTHS, _length.PAPER[title][condition], strict=True))
                cells.append(f"{paper[length]:.2f}" if length in paper else "-")
            table.append([title, f"{length:,}", *cells])
    return table


def panels(measured: list[dict]) -> list[Panel]:
    """Per corpus: perplexity by context length."""
    points: dict[str, dict[str, list]] = {}
    for row in measured:
        of_corpus = points.setdefault(row["corpus"], {})
        of_corpus.setdefault(row["folder"], []).append((row["length"], row["perplexity"]))
    panels = []
    for corpus, folders in points.items():
        curves = [Curve(folder, *zip(*xy, strict=True)) for folder, xy in folders.items()]
        panels.append(Panel(corpus, curves, "context length (tokens)", "perplexity", log_x=True, log_y=True))
    return panels


def run_perplexity(args, folder: Folder, spans: dict, device: torch.device) -> list[dict]:
    """Rows of one folder: every corpus at every length. Raises: ValueError if no token stood before a text in training."""
    start = folder.tokenizer.documents.start
    if not start:
        raise ValueError(
            f"{folder.path}: no token stood between the documents of its training data, so the first token of a window cannot "
            "be predicted. Leave the folder out of --perplexity."
        )
    model, rows = load_model(folder.path, device=device, dtype=DTYPES.get(args.dtype), verify=False), []
    for corpus, used in spans.items():
        for length in sorted(set(args.lengths)):
            name = f"{folder.path}, {corpus}"
            row = perplexity.measure(model, used, length, start, batch=args.batch_size, name=name)
            rows.append({"corpus": corpus, **row})
    return rows


def fetch(args, names: list[str]) -> None:
    """Fetch the data of tasks and the paper's corpora. Raises: ValueError, FileNotFoundError for data that cannot be had."""
    if names:
        harness.load_tasks(args.tasks, args.include_path, fetch=True)
    if _length.NAME in args.perplexity:
        if not (args.corpora / _length.SOURCES).is_file():
            _length.fetch(args.corpora)
        for name, row in _length.read_record(args.corpora).items():
            print(f"{name:<12} {row['documents']:>6,} documents, {row['bytes']:>11,} bytes of {row['dataset']}")
        names = [*names, f"the paper's corpora ({args.corpora})"]
    elif not names:
        raise ValueError(f"--fetch has nothing to fetch. Add --tasks NAME ... or --perplexity {_length.NAME}.")
    print(f"the data of {', '.join(names)} are on this machine")


@_cli.user_errors
def main(argv=None) -> int:
    args = parse(argv)
    names = check_options(args)
    if args.fetch:
        fetch(args, names)
        return 0
    if not args.folders:
        raise ValueError("no folder was given. Name one or more standalone folders (interdomain convert makes them).")
    device = results.choose_device(args.device)
    folders = [open_folder(path) for path in args.folders]
    corpora, record = corpora_of(args)
    data = {}
    for folder in folders:
        if folder.data_key not in data:
            data[folder.data_key] = read_data(args, names, corpora, folder.tokenizer)
    options = {name: getattr(args, name) for name in RECORDED} | {"tasks": names}
    options["max_length"] = args.max_length or min(folder.config.max_seq_len for folder in folders)
    output = args.output or Path(f"outputs/evaluations/{datetime.datetime.now():%Y-%m-%d-%H%M%S}")
    report = results.Report("evaluation", output, device, options, f"exported folders on {device.type.upper()}")
    report.contents["environment"] |= versions(PACKAGES)
    report.contents |= {"tasks": {}, "perplexity": []} | ({"corpora": record} if record else {})
    report.table("folders", ["folder", *folders[0].facts()])
    for folder in folders:
        report.add("folders", {"folder": str(folder.path), **folder.facts()})
    for note in notes(options, len({folder.tokenizer.sha256 for folder in folders})):
        report.note(note)
    for folder in folders:
        if note := _cli.documents_note(folder.path, folder.tokenizer):
            report.note(note)
    how = dict(max_length=options["max_length"], batch_size=args.batch_size, dtype=args.dtype, limit=args.limit)
    for folder in folders:
        name, (tasks, spans) = str(folder.path), data[folder.data_key]
        if tasks:
            measured = report.contents["tasks"][name] = {}
            for _, out in harness.evaluate_folder(folder.path, tasks, folder.tokenizer, device, **how):
                for kind, values in out.items():
                    measured.setdefault(kind, {}).update(values)
                save(report)
            release(device)
        if spans:
            rows = run_perplexity(args, folder, spans, device)
            report.contents["perplexity"] += [{"folder": name, **row} for row in rows]
            save(report)
            release(device)
    report.contents["status"] = "complete"
    save(report)
    print((output / MARKDOWN).read_text())
    written = f"wrote {report.json} and {MARKDOWN}"
    if corpora:
        drawn = draw(output / PLOT, panels(report.contents["perplexity"]))
        written += f" and {PLOT}" if drawn else f"; no plot without matplotlib: {_cli.install_command('eval')}"
    print(written)
    return 0


def notes(options: dict, tokenizers: int) -> Iterator[str]:
    """Notes for a reader of the tables."""
    if options["limit"]:
        yield f"A trial: only the first {options['limit']} samples of each task and spans of each corpus."
    if options["tasks"]:
        seen = f"at most {options['max_length']:,} tokens seen, of niah_* as many as its name says"
        yield f"Tasks: lm-evaluation-harness, {seen}, ± standard error."
    if options["perplexity"]:
        joined = "joined" if options["packed"] else "apart"
        yield f"Perplexity: windows without overlap, each from an empty state, documents {joined} (docs/evaluation.md)."
        if options["perplexity"] == [_length.NAME]:
            yield "The paper does not say which documents it read, nor how they were cut: compare shapes (docs/length.md)."
        if tokenizers > 1:
            yield "The folders have different tokenizers: compare bits per byte, not perplexities."


if __name__ == "__main__":
    sys.exit(main())
