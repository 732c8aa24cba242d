"""interdomain prepare-data --input stdlib --output data/stdlib

Turn text, or a made-up recall task, into a prepared corpus.

A prepared corpus is a folder of token ids (Megatron's .bin/.idx files) in a training and a
validation split, with the tokenizer and a manifest of checksums. The same input gives the same
bytes, with any number of worker processes. If the command is killed, run it again: it continues
where it stopped.

    interdomain prepare-data --input 'texts/*.jsonl.gz' --vocab-size 32000 --output data/mine
    interdomain prepare-data --input debian --output data/debian
    interdomain prepare-data --synthetic mqar --output data/mqar
    interdomain prepare-data --verify data/stdlib

Documentation: docs/data.md; for --synthetic docs/evaluation.md (Recall)
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from interdomain.data import TokenCorpus, Tokenizer, load_tokenizer, read_manifest
from interdomain.data.corpus import FORMAT, FORMAT_VERSION, MANIFEST
from interdomain.data.readers import (
    FILE_KINDS,
    Span,
    documents_of,
    find_inputs,
    in_validation,
    list_spans,
)
from interdomain.data.synthetic import TASKS, tokenizer_json, write_examples
from interdomain.data.tokenize_parallel import Encoding, Part, cut, encode_parts, merge_parts
from interdomain.data.tokenizer import JsonTokenizer, SentencePieceTokenizer, train_sentencepiece
from interdomain.folders import new_folder, resumable_folder, write_atomically
from interdomain.tools._cli import (
    OUTPUT,
    argument_parser,
    path_argument,
    path_or_name,
    require_at_least,
    user_errors,
)
from interdomain.tools._progress import progress_bar

# Difference between the validation split's share of the tokens and --validation-fraction above
# which a warning is printed.
MAX_SHARE_ERROR = 0.05
BYTES_PER_WORKER = 4_000_000  # on the disk; for less, a process takes longer to start than to work
# Options that only one kind of corpus reads.
TEXT_OPTIONS = ("text_field", "max_bytes", "leave_out_bad", "tokenizer", "vocab_size", "workers")
RECALL_OPTIONS = (
    "synthetic_length",
    "synthetic_items",
    "synthetic_vocab",
    "synthetic_examples",
    "synthetic_seed",
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line.

    Raises:
        ValueError: A number is out of range, or an option has no effect.
    """
    parser = argument_parser(__doc__, "(--output DIR | --verify CORPUS)")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--output", type=path_argument, metavar="DIR", help=OUTPUT)
    task.add_argument(
        "--verify",
        type=path_argument,
        metavar="CORPUS",
        help="only compare a corpus's bytes with its manifest",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.02,
        help="share of the documents in the validation split, at least 0 and below 1",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=1_000_000_000,
        help="size of a shard in tokens; a larger corpus has several",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input",
        nargs="+",
        type=path_or_name,
        default=["stdlib"],
        help="stdlib (the sources of Python's standard library); debian (manuals and books from Debian packages, which apt-get "
        f"downloads), debian:FOLDER (their .deb files at hand); {FILE_KINDS}, as paths, folders or quoted globs; "
        "or hf:NAME[@REVISION][:CONFIG[:SPLIT]], a dataset of the Hugging Face hub",
    )
    source.add_argument("--synthetic", choices=TASKS, help="a recall task; no text is read")

    texts = parser.add_argument_group("a corpus of text")
    texts.add_argument("--text-field", default="text", help="column or JSON field of the text")
    texts.add_argument(
        "--max-bytes", type=int, help="read only so many bytes of the files (default: all)"
    )
    texts.add_argument(
        "--leave-out-bad",
        action="store_true",
        help="leave out bad documents (rows without text, lines that are not JSON, text that is not UTF-8 or that the "
        "tokenizer's library cannot encode) and name each",
    )
    tokenizer = texts.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer",
        type=path_or_name,
        help="use this one: a .model, a tokenizer.json, an X.tiktoken with X.json, tiktoken:NAME, or a folder with one",
    )
    tokenizer.add_argument(
        "--vocab-size",
        type=int,
        default=2048,
        help="without --tokenizer: train a tokenizer of so many tokens on the training split",
    )
    texts.add_argument(
        "--workers",
        type=int,
        help="processes that encode (default: one for every core that has work)",
    )

    recall = parser.add_argument_group(
        "a corpus of a recall task (default sizes: docs/evaluation.md)"
    )
    recall.add_argument(
        "--synthetic-length",
        type=int,
        help="tokens of an example, which must be training.seq_len of the run",
    )
    recall.add_argument(
        "--synthetic-items",
        type=int,
        help="things to remember in an example: pairs (mqar), tokens (selective-copying)",
    )
    recall.add_argument("--synthetic-vocab", type=int, help="words of the vocabulary")
    recall.add_argument(
        "--synthetic-examples", type=int, default=60_000, help="examples of both splits together"
    )
    recall.add_argument(
        "--synthetic-seed", type=int, default=0, help="another seed gives other examples"
    )

    # argparse has no ranges of numbers.
    args = parser.parse_args(argv)
    if not 0 <= args.validation_fraction < 1:
        raise ValueError(
            f"--validation-fraction must be at least 0 and below 1: got {args.validation_fraction}."
        )
    # Options of the other kind of corpus would have no effect. --verify passes over all options.
    purpose = "a corpus of text"
    unused = RECALL_OPTIONS
    if args.synthetic:
        purpose = f"a corpus of --synthetic {args.synthetic}"
        unused = TEXT_OPTIONS
    for name in unused:
        if args.output is not None and getattr(args, name) != parser.get_default(name):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} has no effect on {purpose}: leave it out.")
    require_at_least(
        args, max_bytes=1, vocab_size=1, shard_tokens=1, workers=1, synthetic_examples=1
    )
    return args


def describe(folder: Path, verb: str, verify: bool = False) -> str:
    """Returns the result line for a complete corpus.

    Args:
        folder: The corpus.
        verb: First word of the line.
        verify: Compare checksums, and not only sizes.

    Raises:
        ValueError: The files are not those of the manifest.
    """
    manifest = read_manifest(folder)
    tokens = {"validation": 0}
    # Opening a split compares its files with the manifest.
    for split in manifest["splits"]:
        tokens[split] = TokenCorpus(folder, split, verify=verify).num_tokens
    counts = f"{tokens['train']:,} training tokens, {tokens['validation']:,} validation tokens"
    return f"{verb} {folder} ({counts}, vocabulary {manifest['vocab_size']:,})"


def write_manifest(
    folder: Path, tokenizer: Tokenizer, request: dict, splits: dict, **further: dict
) -> None:
    """Writes the manifest of a corpus, whose format is in `interdomain.data.corpus`.

    Args:
        folder: The corpus.
        tokenizer: Its tokenizer.
        request: Everything that the corpus is a function of.
        splits: The shards' records by split.
        further: More fields.

    Raises:
        ValueError: A split that was asked for is empty.
    """
    fraction = request["validation_fraction"]
    if "train" not in splits or (fraction > 0 and "validation" not in splits):
        raise ValueError(
            f"The documents fall into {' '.join(splits) or 'no split'} alone (--validation-fraction {fraction}). Give more "
            "documents or examples (a text file is one document: cut a long text into files), another fraction, or 0 for no "
            "validation split."
        )
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tokenizer": {"file": tokenizer.file, "sha256": tokenizer.sha256},
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "source": request,
        **further,
        "splits": splits,
    }
    text = json.dumps(manifest, indent=2) + "\n"
    write_atomically(folder / MANIFEST, text.encode())


def warn_of_share(splits: dict[str, list[dict]], fraction: float) -> None:
    """Warns if the validation split has a much larger or smaller share of the tokens than was asked for.

    The fraction is of the documents, so this happens if there are few of them.

    Args:
        splits: The shards' records by split.
        fraction: The share that was asked for.
    """
    tokens = {"validation": 0}
    documents = 0
    for split, shards in splits.items():
        tokens[split] = sum(shard["tokens"] for shard in shards)
        documents += sum(shard["documents"] for shard in shards)
    share = tokens["validation"] / sum(tokens.values())
    if abs(share - fraction) > MAX_SHARE_ERROR:
        print(
            f"warning: the validation split has {share:.0%} of the tokens, and --validation-fraction is {fraction}: the "
            f"fraction is of the {documents:,} documents. More or shorter documents bring the share nearer.",
            file=sys.stderr,
        )


def prepare_synthetic(args: argparse.Namespace) -> None:
    """Makes the corpus of a recall task: examples of a made-up task, as token ids.

    Args:
        args: The options of the command.
    """
    # Sizes that the user does not give are the task's defaults.
    kind = TASKS[args.synthetic]
    sizes = dict(kind.defaults)
    for name in sizes:
        size = getattr(args, f"synthetic_{name}")
        if size is not None:
            sizes[name] = size
    task = kind(**sizes, seed=args.synthetic_seed)

    examples = args.synthetic_examples
    validation = round(examples * args.validation_fraction)
    counts = {"validation": validation, "train": examples - validation}
    # Everything that the corpus is a function of, as the manifest keeps it.
    request = {
        "synthetic": args.synthetic,
        **asdict(task),
        "examples": examples,
        "validation_fraction": args.validation_fraction,
    }
    # Only answers count in the loss. The manifest says how many of an example's tokens are answers.
    answers = {"example_tokens": task.length, "per_example": task.answers}
    bar = progress_bar(total=examples, unit=" examples")
    with new_folder(args.output) as folder, bar:
        tokenizer_file = folder / JsonTokenizer.file
        write_atomically(tokenizer_file, tokenizer_json(task.words()))
        splits = write_examples(task, folder, counts, args.shard_tokens, bar.update)
        write_manifest(folder, load_tokenizer(tokenizer_file), request, splits, answers=answers)


def prepare_text(args: argparse.Namespace) -> None:
    """Makes a corpus of text.

    Args:
        args: The options of the command.
    """
    inputs = find_inputs(args.input)
    # Everything that the corpus is a function of, as the manifest keeps it.
    request = {
        "inputs": inputs.described,
        "text_field": args.text_field,
        "max_bytes": args.max_bytes,
        "validation_fraction": args.validation_fraction,
        "shard_tokens": args.shard_tokens,
        "tokenizer": {"trained_vocab_size": args.vocab_size},
    }
    tokenizer = None
    if args.tokenizer:
        tokenizer = load_tokenizer(args.tokenizer)
        # Raises here, and not for the first document, if there is no EOS.
        tokenizer.encode("", add_eos=True)
        request["tokenizer"] = {"sha256": tokenizer.sha256}

    # The work is done in a hidden folder, which stays if this process is killed. The corpus appears
    # when it is complete.
    with resumable_folder(args.output) as work:
        megabytes = sum(file.size for file in inputs.files) / 1e6
        print(f"reading {len(inputs.files):,} files ({megabytes:,.1f} MB)", flush=True)
        # Listing all spans first finds missing columns before the long work.
        spans = list(list_spans(inputs.files, args.text_field, args.max_bytes))
        if tokenizer is None:
            tokenizer = train_tokenizer(work, args, spans)
        encoding = Encoding(
            folder=work,
            tokenizer=tokenizer.write(work),
            text_field=args.text_field,
            leave_out_bad=args.leave_out_bad,
            validation_fraction=args.validation_fraction,
        )
        prefixes = encode(cut(spans), encoding, args.workers)
        # `new_folder` gives the corpus its name at the end.
        with new_folder(args.output) as folder:
            tokenizer.write(folder)
            splits = merge_parts(prefixes, folder, tokenizer.vocab_size, args.shard_tokens)
            write_manifest(folder, tokenizer, request, splits)
        warn_of_share(splits, args.validation_fraction)


def train_tokenizer(work: Path, args: argparse.Namespace, spans: list[Span]) -> Tokenizer:
    """Trains a tokenizer on the training documents of spans, and keeps it in the folder `work`.

    Args:
        work: The folder of unfinished work.
        args: The options of the command.
        spans: The pieces of all input files.
    """
    documents = documents_of(spans, args.text_field, leave_out_bad=args.leave_out_bad)

    def training() -> Iterator[str]:
        for text in progress_bar(documents, desc="reading", unit=" documents"):
            # Validation text stays unseen by the tokenizer, too.
            if not in_validation(text, args.validation_fraction):
                yield text
        # sentencepiece has read everything. From here on it shows no progress.
        print(f"training a tokenizer of {args.vocab_size:,} tokens", flush=True)

    path = work / SentencePieceTokenizer.file
    write_atomically(path, train_sentencepiece(training(), args.vocab_size))
    return load_tokenizer(path)


def encode(parts: list[Part], encoding: Encoding, workers: int | None) -> list[list[Path]]:
    """Encodes parts, with a progress bar. Returns the path prefixes of each (see `encode_part`).

    Args:
        parts: Parts from `cut`. A part is a piece of the input that one process encodes.
        encoding: Settings for all of them.
        workers: Number of processes. None: one for every core that has work.
    """
    total = sum(part.size for part in parts)
    if workers is None:
        cores = len(os.sched_getaffinity(0))
        workers = max(1, min(cores, total // BYTES_PER_WORKER))
    prefixes = []
    description = f"tokenising (processes: {workers})"
    bar = progress_bar(desc=description, total=total, unit="B", unit_scale=True)
    # Closed at once after an error, because its processes write into the work folder.
    with bar, contextlib.closing(encode_parts(parts, encoding, workers)) as results:
        for part, result in zip(parts, results, strict=True):
            prefixes.append(result)
            bar.update(part.size)
    return prefixes


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    if args.verify is not None:
        print(describe(args.verify, "verified", verify=True))
        return 0
    if args.synthetic:
        prepare_synthetic(args)
    else:
        prepare_text(args)
    print(describe(args.output, "wrote"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
