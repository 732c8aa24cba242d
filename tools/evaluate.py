"""interdomain evaluate exports/softmax exports/interdomain --tasks paper

Evaluate standalone folders on tasks and by perplexity.

Several folders stand side by side in one table. Tasks are those of lm-evaluation-harness (default: the paper's).
--perplexity measures perplexity against context length. evaluation.json and evaluation.md are written after every
task and folder, with machine and versions. Tasks and the paper's corpora come from the Hugging Face hub: use --fetch
once where there is a network.

    interdomain evaluate --fetch --tasks paper --perplexity paper
    interdomain evaluate exports/debug --perplexity README.md --packed --lengths 256 512 --limit 4

Documentation: docs/evaluation.md; for --perplexity docs/length.md
"""

import argparse
import datetime
import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interdomain.checkpoint.pretrained import (
    CONFIG,
    DTYPES,
    check_weights,
    load_checked_tokenizer,
    load_model,
    read_config,
)
from interdomain.data import Tokenizer
from interdomain.data.readers import find_inputs, list_spans
from interdomain.environment import versions
from interdomain.folders import write_whole
from interdomain.model import ModelConfig, cell_of, count_parameters, meta_model
from interdomain.tools import _cli
from interdomain.tools._bench import results
from interdomain.tools._bench.pages import page
from interdomain.tools._bench.timing import release
from interdomain.tools._evaluate import harness, length, perplexity, task_table

MARKDOWN = "evaluation.md"
RECORDED = ("dtype", "limit", "perplexity", "lengths", "packed")  # options that change figures
NOTES = (
    "Tasks: lm-evaluation-harness, ± standard error. Perplexity: windows without overlap, each from an empty state "
    "(docs/evaluation.md); compare bits per byte if tokenizers differ. The paper does not say which documents it read, nor how "
    "they were cut: compare shapes (docs/length.md)."
)
PACKAGES = ("lm_eval", "transformers", "accelerate", "datasets")


def parse(argv) -> argparse.Namespace:
    p = _cli.argument_parser(__doc__, "FOLDER [FOLDER ...]")
    p.add_argument(
        "folders",
        nargs="*",
        type=_cli.path_or_name,
        metavar="FOLDER",
        help=f"{_cli.STANDALONE}; before all options",
    )
    p.add_argument(
        "--output",
        type=_cli.path_argument,
        metavar="DIR",
        help=f"{_cli.RESULTS} (default: outputs/evaluations/TIME)",
    )
    p.add_argument(
        "--fetch",
        action="store_true",
        help="fetch the data from the hub, and stop; no FOLDER is needed",
    )
    add_options(p)
    return p.parse_args(argv)


def add_options(p: argparse.ArgumentParser) -> None:
    """Options that say what is measured, and how: those of `check_options`, `corpora_of` and `read_data`."""
    _cli.add_device(p)
    _cli.add_dtype(p, DTYPES)
    p.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="texts or windows at once, at least 1",
    )
    p.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="for a trial: only N samples of each task, and N windows (of the longest length) of each corpus",
    )
    tasks = p.add_argument_group("tasks (need the extra `eval`: docs/evaluation.md)")
    suites = ", ".join(task_table.SUITES)
    tasks.add_argument(
        "--tasks",
        nargs="+",
        metavar="NAME",
        help=f"suites ({suites}) or names of lm-evaluation-harness (default: paper, or none with --perplexity)",
    )
    tasks.add_argument(
        "--include-path",
        nargs="+",
        type=_cli.path_argument,
        default=[],
        metavar="DIR",
        help="folders with task files of your own, in the harness's format",
    )
    tasks.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens that a model sees at most (default: the shortest length that one of the folders was trained at)",
    )
    windows = p.add_argument_group("perplexity against context length")
    windows.add_argument(
        "--perplexity",
        nargs="+",
        type=_cli.path_or_name,
        default=[],
        metavar="CORPUS",
        help="corpora: text files (.txt, .md, .jsonl, .parquet, ...), each a file, a folder or a quoted glob; or only `paper`",
    )
    windows.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=[*task_table.LENGTHS],
        metavar="N",
        help="context lengths in tokens, each at least 1",
    )
    windows.add_argument(
        "--packed",
        action="store_true",
        help="join the documents of a corpus; without it, documents shorter than the longest length are left out",
    )
    windows.add_argument(
        "--corpora",
        type=_cli.path_argument,
        default=Path("data/length"),
        metavar="DIR",
        help="where --fetch puts the corpora of `paper`",
    )
    windows.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="column or JSON field of the text",
    )


def check_options(args) -> list[str]:
    """Checks what can be seen without any data. Returns: the names of --tasks. Raises: ValueError, ModuleNotFoundError."""
    if args.tasks is None:
        args.tasks = [] if args.perplexity else ["paper"]
    names = task_table.task_names(args.tasks)
    if names and importlib.util.find_spec("lm_eval") is None:
        raise ModuleNotFoundError(name="lm_eval")
    if length.NAME in args.perplexity and len(args.perplexity) > 1:
        raise ValueError(
            f"--perplexity {length.NAME} stands alone. Evaluate other corpora with a second command."
        )
    _cli.require_at_least(args, batch_size=1, lengths=1, limit=1, max_length=1)
    if args.max_length is not None and not names:
        raise ValueError(
            "--max-length is of --tasks, and there are none; the lengths of --perplexity are --lengths."
        )
    return names


def corpora_of(args) -> dict[str, str]:
    """{corpus of --perplexity: its files}, after a check of what can be seen without reading all of it.

    Raises:
        ValueError, FileNotFoundError: A corpus cannot be read.
    """
    if length.NAME in args.perplexity:
        args.packed = True
        args.text_field = "text"
        return {
            name: str(args.corpora / f"{name}.jsonl") for name in length.read_record(args.corpora)
        }
    if args.perplexity:
        list(list_spans(find_inputs(args.perplexity).files, args.text_field))
    return {name: name for name in args.perplexity}


def read_data(
    args, names: list[str], corpora: dict[str, str], tokenizer: Tokenizer
) -> tuple[dict, dict]:
    """The data of tasks and corpora for a tokenizer: ({task: it with its data}, {corpus: its spans})."""
    tasks = {}
    if names:
        tasks = harness.load_tasks(args.tasks, args.include_path, tokenizer)
    spans = {}
    options = dict(text_field=args.text_field, packed=args.packed, limit=args.limit)
    for corpus, path in corpora.items():
        spans[corpus] = perplexity.read_spans(path, tokenizer, max(args.lengths), **options)
    return tasks, spans


@dataclass(frozen=True)
class Folder:
    """An exported model before its weights are read."""

    path: Path
    config: ModelConfig
    record: dict
    tokenizer: Tokenizer

    @property
    def data_key(self) -> tuple:
        """Equal for exported models that read the same tokens."""
        return self.tokenizer.sha256, self.tokenizer.documents

    def facts(self) -> dict:
        facts = self.record.get("facts", {})
        validation = facts.get("validation") or {}
        return {
            **cell_of(self.config, facts.get("size", "unknown"))._asdict(),
            "parameters": count_parameters(meta_model(self.config)),
            "stored as": self.record.get("dtype"),
            "step": facts.get("step"),
            "trained tokens": facts.get("tokens"),
            "validation perplexity": validation.get("perplexity"),
            "trained at length": self.config.max_seq_len,
            "tokenizer": self.tokenizer.sha256[:16],
            "texts begin with": self.tokenizer.documents.start,
            # config.json holds the checksums of the weights.
            CONFIG: hashlib.sha256((self.path / CONFIG).read_bytes()).hexdigest()[:16],
        }


def open_folder(folder: str) -> Folder:
    """Opens an exported model. Raises: FileNotFoundError, ValueError if it is none, not whole, or not as it was written."""
    path = Path(folder)
    config, record = read_config(path)
    opened = Folder(path, config, record, load_checked_tokenizer(path, config, record))
    check_weights(path, record)
    return opened


def save(report: results.Report) -> None:
    """Writes JSON and Markdown, with the tables of what is known so far."""
    contents = report.contents
    folders = report.rows("folders")
    cells = {(row["size"], row["condition"]) for row in folders}
    if contents["tasks"]:
        by_folder = {name: out["results"] for name, out in contents["tasks"].items()}
        rows = task_table.task_rows(by_folder, cells)
        report.table("tasks", [*rows[0]], rows)
    if contents["perplexity"]:
        names = [row["folder"] for row in folders]
        groups = corpus_groups(list(dict.fromkeys(row["corpus"] for row in contents["perplexity"])))
        in_paper = cells if "corpora" in contents else set()
        rows = task_table.perplexity_rows(contents["perplexity"], names, groups, in_paper)
        report.table("perplexity by context length", [*rows[0]], rows)
    report.write()
    write_whole(report.folder / MARKDOWN, "\n".join([*page(contents), ""]).encode())


def corpus_groups(corpora: list[str]) -> dict[str, list[str]]:
    """Rows of the table of perplexities: each corpus, and the mean of several. Of the paper's, its mean has five."""
    groups = {corpus: [corpus] for corpus in corpora}
    if corpora == [*length.CORPORA]:
        groups[length.MEAN] = length.IN_MEAN
    elif len(corpora) > 1:
        groups[f"mean of {len(corpora)}"] = corpora
    return groups


def run_perplexity(args, folder: Folder, spans: dict, device: torch.device) -> list[dict]:
    """Rows of one exported model: every corpus at every length.

    Raises:
        ValueError: No token stood before a text in training.
    """
    start = folder.tokenizer.documents.start
    if not start:
        raise ValueError(
            f"{folder.path}: no token stood between the documents of its training data, so the first token of a window cannot "
            "be predicted. Leave the folder out of --perplexity."
        )
    model = load_model(folder.path, device=device, dtype=DTYPES.get(args.dtype), verify=False)
    rows = []
    for corpus, used in spans.items():
        for tokens in sorted(set(args.lengths)):
            name = f"{folder.path}, {corpus}"
            row = perplexity.measure(model, used, tokens, start, batch=args.batch_size, name=name)
            rows.append({"corpus": corpus, **row})
    return rows


def fetch(args, names: list[str]) -> None:
    """Fetches the data of tasks and the paper's corpora. Raises: ValueError, FileNotFoundError for data that cannot be had."""
    wanted = list(names)
    if names:
        harness.load_tasks(args.tasks, args.include_path, fetch=True)
    if length.NAME in args.perplexity:
        wanted.append(f"the paper's corpora ({args.corpora})")
        if not (args.corpora / length.SOURCES).is_file():
            length.fetch(args.corpora)
        for name, row in length.read_record(args.corpora).items():
            print(
                f"{name:<12} {row['documents']:>6,} documents, {row['bytes']:>11,} bytes of {row['dataset']}"
            )
    if not wanted:
        raise ValueError(
            f"--fetch has nothing to fetch. Add --tasks NAME ... or --perplexity {length.NAME}."
        )
    print(f"the data of {', '.join(wanted)} are on this machine")


@_cli.user_errors
def main(argv=None) -> int:
    args = parse(argv)
    names = check_options(args)
    if args.fetch:
        fetch(args, names)
        return 0
    if not args.folders:
        raise ValueError(
            "no folder was given. Name one or more standalone folders (interdomain convert makes them)."
        )
    output = args.output or Path(f"outputs/evaluations/{datetime.datetime.now():%Y-%m-%d-%H%M%S}")
    evaluate_folders(args, names, output)
    print((output / MARKDOWN).read_text())
    print(f"wrote {output / 'evaluation.json'} and {MARKDOWN}")
    return 0


def evaluate_folders(args, names: list[str], output: Path) -> dict[str, Any]:
    """Evaluates args.folders. Returns: the contents of evaluation.json, which is written into `output`."""
    device = results.choose_device(args.device)

    # Everything that can be wrong with the models and the data is found before anything is measured.
    folders = [open_folder(path) for path in args.folders]
    corpora = corpora_of(args)
    data = {}
    for folder in folders:
        if folder.data_key not in data:
            data[folder.data_key] = read_data(args, names, corpora, folder.tokenizer)

    # The report of what is asked for.
    max_length = args.max_length or min(folder.config.max_seq_len for folder in folders)
    options = options_of(args, names) | {"batch_size": args.batch_size, "max_length": max_length}
    report = results.Report(
        "evaluation", output, device, options, f"exported folders on {device.type.upper()}"
    )
    report.contents["environment"] |= versions(PACKAGES)
    report.contents |= {"tasks": {}, "perplexity": []}
    if length.NAME in args.perplexity:
        report.contents["corpora"] = length.read_record(args.corpora)
    report.table("folders", ["folder", *folders[0].facts()])
    for folder in folders:
        report.add("folders", {"folder": str(folder.path), **folder.facts()})
    report.note(NOTES)
    for folder in folders:
        if note := _cli.documents_note(folder.path, folder.tokenizer):
            report.note(note)

    # Measure, and write after each task and model.
    for folder in folders:
        name = str(folder.path)
        tasks, spans = data[folder.data_key]
        if tasks:
            measured = report.contents["tasks"][name] = {}
            for _, out in harness.evaluate_folder(
                folder.path, tasks, folder.tokenizer, device, max_length, args
            ):
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
    return report.contents


def options_of(args, names: list[str]) -> dict[str, Any]:
    """The options that change figures."""
    return {name: getattr(args, name) for name in RECORDED} | {"tasks": names}


if __name__ == "__main__":
    sys.exit(main())
