"""interdomain evaluate exports/softmax exports/interdomain --tasks paper

Evaluate exported models on tasks and by perplexity.

Several folders stand side by side in one table. Tasks are those of lm-evaluation-harness (default:
the paper's). --perplexity measures perplexity against context length. evaluation.json and
evaluation.md are written after every task and folder, with machine and versions. Tasks and the
paper's corpora come from the Hugging Face hub: use --fetch once where there is a network.

    interdomain evaluate --fetch --tasks paper --perplexity paper
    interdomain evaluate exports/debug --perplexity README.md --packed --lengths 256 512 --limit 4

Documentation: docs/evaluation.md
"""

import argparse
import datetime
import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
from interdomain.folders import write_atomically
from interdomain.model import ModelConfig, cell_of, count_parameters, meta_model
from interdomain.tools import _cli
from interdomain.tools._bench import results
from interdomain.tools._bench.pages import page
from interdomain.tools._bench.timing import release
from interdomain.tools._evaluate import harness, length, perplexity, task_table
from interdomain.tools._paper import has_papers_tokens

MARKDOWN = "evaluation.md"
RECORDED = ("dtype", "limit", "perplexity", "lengths", "packed")  # options that change figures
TASKS_NOTE = "Tasks: lm-evaluation-harness, ± standard error."
PERPLEXITY_NOTE = (
    "Perplexity: windows without overlap, each from an empty state (docs/evaluation.md); compare bits per byte if tokenizers "
    "differ. The paper does not say which documents it read, nor how they were cut: compare shapes (docs/evaluation.md)."
)
PACKAGES = ("lm_eval", "transformers", "accelerate", "datasets")  # whose versions are recorded


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = _cli.argument_parser(__doc__, "FOLDER [FOLDER ...]")
    p.add_argument(
        "folders",
        nargs="*",
        type=_cli.path_or_name,
        metavar="FOLDER",
        help=f"{_cli.EXPORTED_MODEL}; before all options",
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
    """Adds the options that say what is measured and how. `watch` has them, too.

    Args:
        p: The parser of `evaluate` or `watch`.
    """
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
        help="for a trial: only N samples of each task and N windows (of the longest length) of each corpus",
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


def check_options(args: argparse.Namespace) -> None:
    """Checks what can be checked without any data, and sets `args.names`, the names of the tasks.

    Raises:
        ValueError: Options contradict each other, or are too small.
        ModuleNotFoundError: lm-evaluation-harness is not installed.
    """
    # Without --tasks and --perplexity, the paper's tasks are meant.
    if args.tasks is None:
        args.tasks = [] if args.perplexity else ["paper"]
    args.names = task_table.task_names(args.tasks)
    # `main` says which extra has the missing package.
    if args.names and importlib.util.find_spec("lm_eval") is None:
        raise ModuleNotFoundError(name="lm_eval")
    if length.NAME in args.perplexity and len(args.perplexity) > 1:
        raise ValueError(
            f"--perplexity {length.NAME} stands alone. Evaluate other corpora with a second command."
        )
    if args.max_length and not args.names:
        raise ValueError("--max-length is for --tasks; the lengths of --perplexity are --lengths.")
    _cli.require_at_least(args, batch_size=1, lengths=1, limit=1, max_length=1)


def corpora_of(args: argparse.Namespace) -> dict[str, str]:
    """Finds the corpora of --perplexity.

    Everything is checked that can be checked without reading all of the text.

    Args:
        args: The options. For the paper's corpora, `packed` and `text_field` are set.

    Returns:
        The path or glob of each corpus, by its title.

    Raises:
        ValueError, FileNotFoundError: A corpus cannot be read.
    """
    # The paper's corpora were written by --fetch, with a fixed field, and are always joined.
    if length.NAME in args.perplexity:
        args.packed = True
        args.text_field = "text"
        record = length.read_record(args.corpora)
        return {name: str(args.corpora / f"{name}.jsonl") for name in record}
    # Corpora of the user: the files are there, and have the field.
    if args.perplexity:
        list(list_spans(find_inputs(args.perplexity).files, args.text_field))
    return {name: name for name in args.perplexity}


class Data(NamedTuple):
    """The data of an evaluation, in the tokens of one tokenizer.

    Attributes:
        tasks: The tasks of --tasks with their data.
        spans: The text of each corpus of --perplexity, from `perplexity.read_spans`.
    """

    tasks: harness.Tasks
    spans: dict[str, np.ndarray]


def read_data(args: argparse.Namespace, corpora: dict[str, str], tokenizer: Tokenizer) -> Data:
    """Reads the data of all tasks and corpora for one tokenizer.

    Args:
        args: The options.
        corpora: The path or glob of each corpus, by its title.

    Returns:
        The tasks, and of each corpus stretches of the longest length, at most --limit of them.
        tokenizer: The tokenizer of one or several of the models.
    """
    tasks = {}
    if args.tasks:
        tasks = harness.load_tasks(args.tasks, args.include_path, tokenizer)
    spans = {}
    for corpus, path in corpora.items():
        spans[corpus] = perplexity.read_spans(
            path,
            tokenizer,
            max(args.lengths),
            text_field=args.text_field,
            packed=args.packed,
            limit=args.limit,
        )
    return Data(tasks, spans)


@dataclass(frozen=True)
class Folder:
    """An exported model before its weights are read.

    Attributes:
        path: The folder.
        config: The model's configuration.
        record: The part of config.json that describes the run.
        tokenizer: The model's tokenizer.
    """

    path: Path
    config: ModelConfig
    record: dict[str, Any]
    tokenizer: Tokenizer

    def facts(self) -> dict[str, Any]:
        """Returns the columns of the table of folders."""
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
    """Opens an exported model.

    Args:
        folder: The path, as the user gave it.

    Raises:
        FileNotFoundError, ValueError: It is no exported model, not complete, or not as it was
            written.
    """
    path = Path(folder)
    config, record = read_config(path)
    tokenizer = load_checked_tokenizer(path, config, record)
    check_weights(path, record)
    return Folder(path, config, record, tokenizer)


def save(report: results.Report) -> None:
    """Writes JSON and Markdown, with the tables of what is known so far.

    Args:
        report: The report. Its `contents` have the results of "tasks" and "perplexity" by folder,
            from which the tables are made.
    """
    # The size, condition and tokens of each model decide which figures of the paper stand beside
    # them.
    contents = report.contents
    folders = report.rows("folders")
    cells = set()
    for row in folders:
        if has_papers_tokens(row["size"], row["trained tokens"]):
            cells.add((row["size"], row["condition"]))
    if contents["tasks"]:
        tasks = {name: out["results"] for name, out in contents["tasks"].items()}
        rows = task_table.task_rows(tasks, cells)
        report.table("tasks", list(rows[0]), rows)
    if contents["perplexity"]:
        groups = corpus_groups(list(dict.fromkeys(row["corpus"] for row in contents["perplexity"])))
        if "corpora" not in contents:
            cells = set()  # the paper has no figures for these corpora
        rows = task_table.perplexity_rows(
            contents["perplexity"], [row["folder"] for row in folders], groups, cells
        )
        report.table("perplexity by context length", list(rows[0]), rows)
    report.write()
    write_atomically(report.folder / MARKDOWN, "\n".join([*page(contents), ""]).encode())


def corpus_groups(corpora: list[str]) -> dict[str, list[str]]:
    """Returns the rows of the table of perplexities: each corpus, and the mean of several.

    The mean over the paper's corpora is the paper's, which leaves one out.

    Args:
        corpora: The titles of the corpora.

    Returns:
        The corpora of each row, by its title.
    """
    groups = {corpus: [corpus] for corpus in corpora}
    if corpora == list(length.CORPORA):
        groups[length.MEAN] = length.IN_MEAN
    elif len(corpora) > 1:
        groups[f"mean of {len(corpora)}"] = corpora
    return groups


def check_start(folder: Folder) -> None:
    """Checks that perplexity of an exported model can be measured.

    Args:
        folder: The exported model.

    Raises:
        ValueError: No token stood before a text in training. A window needs one, from which its
            first token is predicted.
    """
    if not folder.tokenizer.documents.start:
        raise ValueError(
            f"{folder.path}: no token stood between the documents of its training data, so the first token of a window cannot "
            "be predicted. Leave the folder out of --perplexity."
        )


def run_perplexity(
    args: argparse.Namespace, folder: Folder, spans: dict[str, np.ndarray], device: torch.device
) -> list[dict[str, Any]]:
    """Measures one exported model on every corpus at every length.

    Args:
        args: The options.
        folder: The exported model.
        spans: The text of each corpus, from `Data`.
        device: The device that the model runs on.
    """
    start = folder.tokenizer.documents.start
    model = load_model(folder.path, device=device, dtype=DTYPES.get(args.dtype), verify=False)
    rows = []
    for corpus, text in spans.items():
        name = f"{folder.path}, {corpus}"
        for tokens in sorted(set(args.lengths)):
            row = perplexity.measure(model, text, tokens, start, batch=args.batch_size, name=name)
            rows.append({"corpus": corpus, **row})
    return rows


def fetch(args: argparse.Namespace) -> None:
    """Fetches the data of tasks and the paper's corpora.

    Raises:
        ValueError, FileNotFoundError: Some data cannot be read.
    """
    # The data of tasks go into the hub's cache. Tasks that are made without data have none.
    fetched = list(args.names)
    if args.names:
        harness.load_tasks(args.tasks, args.include_path, fetch=True)
    # The paper's corpora are files in a folder of their own. They are fetched once.
    if length.NAME in args.perplexity:
        if not (args.corpora / length.SOURCES).is_file():
            length.fetch(args.corpora)
        for name, row in length.read_record(args.corpora).items():
            print(
                f"{name:<12} {row['documents']:>6,} documents, {row['bytes']:>11,} bytes of {row['dataset']}"
            )
        fetched.append(f"the paper's corpora ({args.corpora})")
    if not fetched:
        raise ValueError(
            f"--fetch has nothing to fetch. Add --tasks NAME ... or --perplexity {length.NAME}."
        )
    print(f"the data of {', '.join(fetched)} are on this machine")


@_cli.user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    check_options(args)
    if args.fetch:
        fetch(args)
        return 0
    if not args.folders:
        raise ValueError(
            "no folder was given. Name one or more exported models (interdomain convert makes them)."
        )
    # With microseconds: the jobs of an array start in the same second.
    now = f"{datetime.datetime.now():%Y-%m-%d-%H%M%S-%f}"
    output = args.output or Path("outputs/evaluations") / now
    evaluate_folders(args, output)
    print((output / MARKDOWN).read_text())
    print(f"wrote {output / 'evaluation.json'} and {MARKDOWN}")
    return 0


def evaluate_folders(args: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Evaluates args.folders.

    Args:
        args: The options, after `check_options`.
        output: The folder of the report.

    Returns:
        The contents of evaluation.json.
    """
    device = results.choose_device(args.device)

    # Open all models and read all data before anything is measured, so that mistakes appear now.
    folders = [open_folder(path) for path in args.folders]
    if args.perplexity:
        for folder in folders:
            check_start(folder)
    corpora = corpora_of(args)
    data_by_tokenizer = {}
    for folder in folders:
        key = data_key(folder)
        if key not in data_by_tokenizer:
            data_by_tokenizer[key] = read_data(args, corpora, folder.tokenizer)

    # Begin the report with the options and the table of folders.
    max_length = args.max_length or min(folder.config.max_seq_len for folder in folders)
    options = options_of(args) | {"batch_size": args.batch_size, "max_length": max_length}
    label = f"exported models on {device.type.upper()}"
    report = results.Report("evaluation", output, device, options, label)
    report.contents["environment"] |= versions(PACKAGES)
    report.contents |= {"tasks": {}, "perplexity": []}
    if length.NAME in args.perplexity:
        report.contents["corpora"] = length.read_record(args.corpora)
    report.table("folders", ["folder", *folders[0].facts()])
    for folder in folders:
        report.add("folders", {"folder": str(folder.path), **folder.facts()})
    if args.tasks:
        report.note(TASKS_NOTE)
    if args.perplexity:
        report.note(PERPLEXITY_NOTE)
    for folder in folders:
        if note := _cli.documents_note(folder.path, folder.tokenizer):
            report.note(note)

    # Measure, and write after each task and each model.
    for folder in folders:
        name = str(folder.path)
        data = data_by_tokenizer[data_key(folder)]
        # Tasks: the harness loads the model itself.
        if data.tasks:
            measured = report.contents["tasks"][name] = {}
            outputs = harness.evaluate_folder(
                folder.path, data.tasks, folder.tokenizer, device, max_length, args
            )
            for out in outputs:
                # The parts are those of `harness.evaluate_folder`, such as "results", by task.
                for part, values in out.items():
                    measured.setdefault(part, {}).update(values)
                save(report)
            release(device)
        # Perplexity.
        if data.spans:
            for row in run_perplexity(args, folder, data.spans, device):
                report.contents["perplexity"].append({"folder": name, **row})
            save(report)
            release(device)
    report.contents["status"] = "complete"
    save(report)
    return report.contents


def data_key(folder: Folder) -> tuple:
    """Returns a key that is equal for exported models that read the same tokens."""
    return folder.tokenizer.sha256, folder.tokenizer.documents


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that change figures, with the names of the tasks."""
    return {name: getattr(args, name) for name in RECORDED} | {"tasks": args.names}


if __name__ == "__main__":
    sys.exit(main())
