"""python -m interdomain.tools.evaluate exports/softmax exports/interdomain --tasks paper

Evaluate exported folders side by side: tasks of lm-evaluation-harness, through transformers (default: the paper's), and with
--perplexity text, perplexity against context length, through the project's own model and its state.

Results are written after every folder, evaluation.json and evaluation.md, with machine, versions and what the folders are;
with matplotlib a plot of perplexity too. The harness's data sets come from the Hugging Face hub: --fetch only fetches them, for
a machine without a network.
"""

import datetime
import gc
import hashlib
import importlib.metadata
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from interdomain.folders import write_whole
from interdomain.model import Cell, ModelConfig, cell_of, count_parameters, meta_model
from interdomain.model.generation import PREFILL_CHUNK
from interdomain.model.pretrained import CONFIG, DTYPES, check_weights, load_checked_tokenizer, load_model, read_config

from . import _bench, _harness, _perplexity, _task_table
from ._cli import add_device, argument_parser, user_errors
from ._plots import Curve, Panel, draw

PAPER_LENGTHS = [4096, 8192, 14_336]
JSON, MARKDOWN, PLOT = "evaluation.json", "evaluation.md", "perplexity.png"
RECORDED = ("batch_size", "dtype", "limit", "lengths", "packed", "prefill_chunk")  # of the options
PACKAGES, ABSENT = ("lm_eval", "transformers", "accelerate", "datasets"), "not installed"


def parse(argv):
    p = argument_parser(__doc__)
    p.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="made by interdomain.tools.convert; first")
    p.add_argument("--output", type=Path, help="folder of the results (default: outputs/evaluations/<time>)")
    add_device(p)
    p.add_argument("--dtype", choices=DTYPES, help="default: as stored; the dynamics stay float32")
    p.add_argument("--batch-size", type=int, default=8, help="texts or windows at once (default %(default)s)")
    p.add_argument("--limit", type=int, help="only the first so many samples of a task and spans of a corpus: a trial")
    tasks = p.add_argument_group("lm-evaluation-harness")
    suites = f"suites ({', '.join(_task_table.SUITES)}) or the harness's own names"
    tasks.add_argument("--tasks", nargs="+", help=f"{suites}; default: paper, unless --perplexity is given")
    tasks.add_argument("--include-path", nargs="+", type=Path, default=[], help="folders with task files of yours")
    tasks.add_argument("--max-length", type=int, help="tokens that a model sees (default: as the folders were trained)")
    tasks.add_argument("--fetch", action="store_true", help="fetch the tasks' data and stop; needs no FOLDER")
    text = p.add_argument_group("perplexity against context length")
    corpora = ".txt, .jsonl or .parquet files (file, folder or quoted glob), a prepared corpus, or .bin/.idx shards"
    text.add_argument("--perplexity", nargs="+", default=[], metavar="CORPUS", help=f"each a corpus: {corpora}")
    text.add_argument("--lengths", nargs="+", type=int, default=PAPER_LENGTHS, help="in tokens (default: the paper's)")
    text.add_argument("--packed", action="store_true", help="join a corpus's documents, which may be shorter than that")
    text.add_argument("--text-field", default="text", help="column or field with the text (default %(default)s)")
    text.add_argument("--prefill-chunk", type=int, default=PREFILL_CHUNK, help="tokens per pass (default %(default)s)")
    return p.parse_args(argv)


@dataclass(frozen=True)
class Folder:
    """A standalone folder before its weights are read."""

    label: str
    path: Path
    config: ModelConfig
    record: dict
    tokenizer: object

    @property
    def cell(self) -> Cell:
        return cell_of(self.config, self.record.get("facts", {}).get("size", "unknown"))

    def facts(self) -> dict:
        facts = self.record.get("facts", {})
        return {
            **self.cell._asdict(),
            "parameters": count_parameters(meta_model(self.config)),
            "stored as": self.record.get("dtype"),
            "step": facts.get("step"),
            "trained tokens": facts.get("tokens"),
            "validation perplexity": (facts.get("validation") or {}).get("perplexity"),
            "trained at length": self.config.max_seq_len,
            "tokenizer": self.tokenizer.sha256[:16],
            # config.json holds the checksums of the weights.
            CONFIG: hashlib.sha256((self.path / CONFIG).read_bytes()).hexdigest()[:16],
        }


def labels(paths: list) -> list[str]:
    """Last names, or the paths as given where last names repeat. Raises: ValueError for the same twice."""
    names = [Path(path).name or str(path) for path in paths]
    names = names if len(set(names)) == len(names) else [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"given twice: {', '.join(sorted({name for name in names if names.count(name) > 1}))}.")
    return names


def open_folders(paths: list[Path]) -> list[Folder]:
    """Raises: FileNotFoundError, ValueError for a folder that is none, not whole, or not as it was written."""
    folders = []
    for label, path in zip(labels(paths), paths, strict=True):
        config, record = read_config(path)
        folders.append(Folder(label, path, config, record, load_checked_tokenizer(path, config, record)))
        check_weights(path, record)
    return folders


def check(args) -> None:
    """What is wrong with the flags, whatever the folders are. Raises: ValueError."""
    for name in ("batch_size", "limit", "max_length", "prefill_chunk"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {value}.")
    if min(args.lengths) < 1:
        raise ValueError(f"--lengths must be positive numbers of tokens: got {min(args.lengths)}.")
    args.lengths = sorted(set(args.lengths))
    if args.tasks is None:
        args.tasks = [] if args.perplexity else ["paper"]
    if args.tasks:
        _harness.require_harness()
    if not args.folders and not args.fetch:
        raise ValueError("no folder was given: name one or more that interdomain.tools.convert made.")


class Results:
    """evaluation.json and evaluation.md, whole after every `save`. Raises: FileExistsError; nothing is overwritten."""

    def __init__(self, out: Path | None, folders: list[Folder], device, options: dict) -> None:
        self.started = datetime.datetime.now(datetime.UTC)
        self.folder = out or Path("outputs/evaluations") / f"{self.started:%Y-%m-%d-%H%M%S}"
        for name in (JSON, MARKDOWN, PLOT):
            if (self.folder / name).exists():
                raise FileExistsError(
                    f"{self.folder / name} is there already, and results are never overwritten. Give another --output."
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = _bench.environment(device) | {name: _version(name) for name in PACKAGES}
        self.contents = {
            "status": "unfinished",
            "started": self.started.isoformat(timespec="seconds"),
            "environment": {name: value for name, value in environment.items() if value != ABSENT},
            "options": options,
            "folders": {folder.label: folder.facts() for folder in folders},
            "tasks": {},
            "perplexity": [],
        }
        self.save()

    def save(self) -> None:
        seconds = (datetime.datetime.now(datetime.UTC) - self.started).total_seconds()
        self.contents["seconds"] = round(seconds, 1)
        write_whole(self.folder / JSON, (json.dumps(_finite(self.contents), indent=1) + "\n").encode())
        write_whole(self.folder / MARKDOWN, markdown(self.contents).encode())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def _finite(x):
    """JSON has no NaN and no infinity: they become words."""
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def markdown(contents: dict) -> str:
    """The results as a page."""
    folders, options = contents["folders"], contents["options"]
    lines = ["# Evaluation", "", f"{contents['started']}, {contents['status']}, {contents['seconds']:,.0f} s.", ""]
    lines += [f"- {name}: {value}" for name, value in contents["environment"].items()]
    lines += ["", "## Folders", ""]
    facts = list(next(iter(folders.values())))
    lines += _bench.markdown_rows(
        [["", *facts]] + [[label, *(_bench.show(f[name]) for name in facts)] for label, f in folders.items()]
    )
    if options["limit"]:
        lines += ["", f"**A trial: only the first {options['limit']} samples of each task and spans of each corpus.**"]
    if contents["tasks"]:
        lines += ["", "## Tasks", ""]
        found = {label: out["results"] for label, out in contents["tasks"].items()}
        cells = {(facts["size"], facts["condition"]) for facts in folders.values()}
        lines += _bench.markdown_rows(_task_table.table(found, cells))
        seen = f"at most {options['max_length']:,} tokens seen, of niah_* as many as its name says"
        lines += ["", f"lm-evaluation-harness, {seen}, ± standard error."]
        bits = _task_table.lambada_bits(found, cells)
        lines += ["", bits] if bits else []
    if contents["perplexity"]:
        lines += ["", "## Perplexity by context length", ""]
        lines += _bench.markdown_rows(perplexity_table(contents["perplexity"], list(folders)))
        joined = "documents joined" if options["packed"] else "documents apart"
        lines += ["", f"Windows without overlap, {joined}, each from an empty state (protocol: tools/_perplexity.py)."]
        if len({f["tokenizer"] for f in folders.values()}) > 1:
            lines += ["", "The folders have different tokenizers: compare bits per byte, not perplexities."]
    return "\n".join(lines) + "\n"


def perplexity_table(found: list[dict], names: list[str]) -> list[list[str]]:
    """Corpora and lengths down, folders across; below, arithmetic means over corpora where there are several."""
    corpora, lengths = (list(dict.fromkeys(row[key] for row in found)) for key in ("corpus", "length"))
    kinds = {"perplexity": ".2f", "bits per byte": ".4f"}
    table = [
        ["corpus", "length", *(name if kind == "perplexity" else f"{name}, {kind}" for kind in kinds for name in names)]
    ]
    means = [f"mean of {len(corpora)}"] if len(corpora) > 1 else []
    for corpus in corpora + means:
        for length in lengths:
            cells = [corpus, f"{length:,}"]
            for kind, digits in kinds.items():
                for name in names:
                    rows = [row for row in found if (row["length"], row["folder"]) == (length, name)]
                    values = [row[kind] for row in rows if corpus in (row["corpus"], *means)]
                    whole = len(values) == (len(corpora) if corpus in means else 1) and None not in values
                    cells.append(f"{sum(values) / len(values):{digits}}" if whole else "-")
            table.append(cells)
    return table


def panels(found: list[dict]) -> list[Panel]:
    """Per corpus: perplexity by context length, where there are several, and by position within the longest."""
    lengths = sorted({row["length"] for row in found})
    names = list(dict.fromkeys(row["folder"] for row in found))
    drawn = []
    for corpus in dict.fromkeys(row["corpus"] for row in found):
        rows = [row for row in found if row["corpus"] == corpus]
        if len(lengths) > 1:
            curves = [[row for row in rows if row["folder"] == name] for name in names]
            curves = [Curve(c[0]["folder"], [r["length"] for r in c], [r["perplexity"] for r in c]) for c in curves]
            drawn.append(Panel(corpus, curves, "context length (tokens)", "perplexity", log_x=True, log_y=True))
        curves = []
        for row in rows:
            if row["length"] == lengths[-1]:
                x = [(part["from"] + part["to"]) / 2 for part in row["positions"]]
                y = [_perplexity.perplexity(part["nll"]) for part in row["positions"]]
                curves.append(Curve(row["folder"], x, y))
        title = f"{corpus}, windows of {lengths[-1]:,}"
        drawn.append(Panel(title, curves, "position (tokens)", "perplexity", log_y=True))
    return drawn


def run_tasks(args, folders: list[Folder], tasks: dict[str, dict], device, results: Results) -> None:
    """tasks: as every tokenizer has them, by its sha256."""
    for folder in folders:
        mine = tasks[folder.tokenizer.sha256]
        _bench.say(f"{folder.label}: {', '.join(mine['tasks'])}")
        results.contents["tasks"][folder.label] = _harness.evaluate_folder(
            folder.path,
            mine,
            start=folder.tokenizer.eos_id,
            max_length=results.contents["options"]["max_length"],
            batch_size=args.batch_size,
            device=str(device),
            dtype=args.dtype,
            limit=args.limit,
        )
        results.save()


def run_perplexity(args, folders: list[Folder], spans: dict, device, results: Results) -> None:
    for folder in folders:
        model = load_model(folder.path, device=device, dtype=DTYPES.get(args.dtype), verify=False)
        for corpus in labels(args.perplexity):
            used = spans[corpus, folder.tokenizer.sha256]
            for length in args.lengths:
                how = dict(batch=args.batch_size, chunk=args.prefill_chunk, name=f"{folder.label}, {corpus}")
                row = _perplexity.measure(model, used, length, folder.tokenizer.eos_id, **how)
                row |= {"documents": used.documents, "too short": used.skipped}
                results.contents["perplexity"].append({"folder": folder.label, "corpus": corpus, **row})
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        results.save()


def read_all(args, folders: list[Folder]) -> dict:
    """Every corpus as every tokenizer has it: {(corpus, sha256 of the tokenizer): Spans}."""
    spans = {}
    for label, corpus in zip(labels(args.perplexity), args.perplexity, strict=True):
        for folder in folders:
            key = label, folder.tokenizer.sha256
            if key not in spans:
                options = dict(text_field=args.text_field, packed=args.packed, limit=args.limit)
                spans[key] = _perplexity.read_spans(corpus, folder.tokenizer, max(args.lengths), **options)
    return spans


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    check(args)
    names = _task_table.task_names(args.tasks)
    if args.fetch:
        _harness.load_tasks(args.tasks, args.include_path)
        print(f"the data of {', '.join(names)} are on this machine")
        return 0
    device = _bench.choose_device(args.device)
    folders = open_folders(args.folders)
    for corpus in args.perplexity:
        _perplexity.check_corpus(corpus, args.text_field)
    for folder in folders if names else ():
        _harness.check_folder(folder.path)
    tokenizers = {folder.tokenizer.sha256: folder.tokenizer for folder in folders if names}
    tasks = {sha256: _harness.load_tasks(args.tasks, args.include_path, x) for sha256, x in tokenizers.items()}
    spans = read_all(args, folders)
    options = {name: getattr(args, name) for name in RECORDED}
    options["tasks"] = names
    options["max_length"] = args.max_length or min(folder.config.max_seq_len for folder in folders)
    results = Results(args.output, folders, device, options)
    if tasks:
        run_tasks(args, folders, tasks, device, results)
    if spans:
        run_perplexity(args, folders, spans, device, results)
    results.contents["status"] = "complete"
    results.save()
    print((results.folder / MARKDOWN).read_text())
    written = f"wrote {results.folder / JSON} and {MARKDOWN}"
    if spans:
        drawn = draw(results.folder / PLOT, panels(results.contents["perplexity"]))
        written += f" and {PLOT}" if drawn else f"; no plot without matplotlib: {_harness.INSTALL}"
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
