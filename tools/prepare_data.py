"""interdomain prepare-data --input stdlib --output data/stdlib

Turn text, or a made-up recall task, into a prepared corpus.

A prepared corpus is a folder of token ids (Megatron's .bin/.idx files) in a training and a validation split, with the
tokenizer and a manifest of checksums. The same input gives the same bytes, with any number of worker processes. If the
command is killed, run it again: it continues where it stopped.

    interdomain prepare-data --input 'texts/*.jsonl.gz' --vocab-size 32000 --output data/mine
    interdomain prepare-data --input debian --output data/debian
    interdomain prepare-data --synthetic mqar --output data/mqar
    interdomain prepare-data --verify data/stdlib

Documentation: docs/data.md; for --synthetic docs/recall.md
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from interdomain.data import TokenCorpus, Tokenizer, load_tokenizer, read_manifest
from interdomain.data.corpus import FORMAT, FORMAT_VERSION, MANIFEST
from interdomain.data.readers import (
    READ,
    BadDocument,
    documents_of,
    find_inputs,
    in_validation,
    list_spans,
    skip_bad,
)
from interdomain.data.synthetic import TASKS, tokenizer_json, write_examples
from interdomain.data.tokenize_parallel import (
    EncodedPart,
    Encoding,
    Part,
    cut,
    digest_of,
    encode_parts,
    merge_parts,
)
from interdomain.data.tokenizer import JsonTokenizer, SentencePieceTokenizer, train_sentencepiece
from interdomain.folders import kept_folder, new_folder, write_whole
from interdomain.tools._cli import (
    OUTPUT,
    argument_parser,
    path_argument,
    path_or_name,
    require_at_least,
    user_errors,
    visible,
)

# Not for --synthetic.
OF_TEXT = (
    "--input",
    "--text-field",
    "--max-bytes",
    "--skip-bad",
    "--tokenizer",
    "--vocab-size",
    "--workers",
)
SHOWN = 20  # skipped documents that the output names; the manifest names all
BYTES_PER_WORKER = 4_000_000  # on the disk; for less, a process takes longer to start than to work


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__ or "", "(--output DIR | --verify CORPUS)")
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
        metavar="F",
        help="share of the documents in the validation split, at least 0 and below 1",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=1_000_000_000,
        metavar="N",
        help="size of a shard in tokens; a larger corpus has several",
    )

    texts = parser.add_argument_group("a corpus of text")
    texts.add_argument(
        "--input",
        nargs="+",
        type=path_or_name,
        default=["stdlib"],
        metavar="SOURCE",
        help="stdlib (the sources of Python's standard library); debian (manuals and books from Debian packages, which apt-get "
        f"downloads), debian:FOLDER (their .deb files at hand); {READ}, as paths, folders or quoted globs; "
        "or hf:NAME[@REVISION][:CONFIG[:SPLIT]], a dataset of the Hugging Face hub",
    )
    texts.add_argument(
        "--text-field", default="text", metavar="NAME", help="column or JSON field of the text"
    )
    texts.add_argument(
        "--max-bytes",
        type=int,
        metavar="N",
        help="read only so many bytes of the files (default: all)",
    )
    texts.add_argument(
        "--skip-bad",
        type=int,
        default=0,
        metavar="N",
        help="skip at most N bad documents (rows without text, lines that are not JSON, text that is not UTF-8 or that the "
        "tokenizer's library cannot encode); name each",
    )
    tokenizer = texts.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer",
        type=path_or_name,
        metavar="PATH",
        help="use this one: a .model, a tokenizer.json, an X.tiktoken with X.json, tiktoken:NAME, or a folder with one",
    )
    tokenizer.add_argument(
        "--vocab-size",
        type=int,
        default=2048,
        metavar="N",
        help="without --tokenizer: train a tokenizer of so many tokens on the training split",
    )
    texts.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that encode (default: one for every core that has work)",
    )

    recall = parser.add_argument_group("a corpus of a recall task (default sizes: docs/recall.md)")
    recall.add_argument("--synthetic", choices=TASKS, help="the task; no text is read")
    recall.add_argument(
        "--synthetic-length", type=int, metavar="T", help="tokens of an example: training.seq_len"
    )
    recall.add_argument(
        "--synthetic-items",
        type=int,
        metavar="P",
        help="things to remember in an example: pairs (mqar), tokens (selective-copying)",
    )
    recall.add_argument("--synthetic-vocab", type=int, metavar="V", help="words of the vocabulary")
    recall.add_argument(
        "--synthetic-examples",
        type=int,
        default=60_000,
        metavar="N",
        help="examples of both splits together",
    )
    recall.add_argument(
        "--synthetic-seed",
        type=int,
        default=0,
        metavar="N",
        help="another seed gives other examples",
    )

    args = parser.parse_args(argv)
    options = [word.partition("=")[0] for word in (sys.argv[1:] if argv is None else argv)]
    of_text = [option for option in OF_TEXT if option in options]
    of_recall = [option for option in options if option.startswith("--synthetic-")]
    if args.synthetic and of_text:
        raise ValueError(
            f"--synthetic makes its own text and tokenizer: leave out {', '.join(of_text)}."
        )
    if of_recall and not args.synthetic:
        raise ValueError(
            f"{', '.join(of_recall)}: used with --synthetic only. Add --synthetic {'|'.join(TASKS)}."
        )
    if not 0 <= args.validation_fraction < 1:
        raise ValueError(
            f"--validation-fraction must be at least 0 and below 1: got {args.validation_fraction}."
        )
    require_at_least(
        args, max_bytes=1, skip_bad=0, vocab_size=1, shard_tokens=1, workers=1, synthetic_examples=1
    )
    return args


def describe(folder: Path, verb: str, verify: bool = False) -> str:
    """The result line for a complete corpus. Opening every split compares its files with the manifest."""
    manifest = read_manifest(folder)
    counts = {"validation": 0}
    for split in manifest["splits"]:
        counts[split] = TokenCorpus(folder, split, verify=verify).num_tokens
    skipped = ""
    if "skipped" in manifest:
        skipped = f", {len(manifest['skipped']):,} bad document(s) skipped"
    return (
        f"{verb} {folder} ({counts['train']:,} training tokens, {counts['validation']:,} validation tokens, "
        f"vocabulary {manifest['vocab_size']:,}{skipped})"
    )


def make_tokenizer(
    folder: Path, args: argparse.Namespace, parts: list[Part], tokenizer: Tokenizer | None
) -> Tokenizer:
    """The corpus's tokenizer, in `folder`: the user's, or one trained on the training documents."""
    if tokenizer:
        return load_tokenizer(tokenizer.write(folder))
    spans = [span for part in parts for span in part.spans]
    library = importlib.metadata.version(SentencePieceTokenizer.library)
    digest = digest_of([args.text_field, args.validation_fraction, args.vocab_size, library], spans)
    path = folder / f"trained-{digest}.model"
    if not path.exists():  # it does if an earlier run was killed later on
        skip = functools.partial(skip_bad, [], args.skip_bad)
        documents = documents_of(spans, args.text_field, skip)
        documents = tqdm(documents, desc="training the tokenizer", unit=" documents", disable=None)
        # Validation text stays unseen by the tokenizer too.
        training = (text for text in documents if not in_validation(text, args.validation_fraction))
        write_whole(path, train_sentencepiece(training, args.vocab_size))
    return load_tokenizer(path)


def encode(
    folder: Path, args: argparse.Namespace, parts: list[Part], tokenizer: Tokenizer
) -> list[EncodedPart]:
    """Encodes the parts in `folder`, but for those that an earlier run left there."""
    size = sum(part.size for part in parts)
    workers = args.workers or max(1, min(len(os.sched_getaffinity(0)), size // BYTES_PER_WORKER))
    encoding = Encoding(
        folder, tokenizer.path, args.text_field, args.validation_fraction, args.skip_bad
    )
    encoded: list[EncodedPart] = []
    skipped: list[BadDocument] = []
    seconds = 0.1 if sys.stderr.isatty() else 60  # a line a minute in a log
    title = f"tokenising ({workers} process{'es' if workers > 1 else ''})"
    bar = tqdm(
        total=size, unit="B", unit_scale=True, desc=title, mininterval=seconds, delay=seconds
    )
    # Closed at once after an error: its processes write into the folder.
    with bar, contextlib.closing(encode_parts(parts, encoding, workers)) as results:
        for part in results:
            bar.update(part.part.size)
            for bad in part.skipped:
                skip_bad(skipped, args.skip_bad, bad)
            encoded.append(part)
    if kept := sum(part.kept for part in encoded):
        print(f"continuing an earlier run: {kept} of {len(parts)} parts were there", flush=True)
    return encoded


def report_skipped(parts: list[EncodedPart], output: Path) -> dict[str, list[dict]]:
    """Prints the bad documents that were skipped. Returns: the manifest's field "skipped", if there are any."""
    skipped = []
    for part in parts:
        for bad in part.skipped:
            skipped.append({"file": bad.file, "place": bad.place, "reason": bad.reason})
            if len(skipped) <= SHOWN:
                print(f"skipped: {visible(str(bad))}")
    if len(skipped) > SHOWN:
        print(f"skipped: {len(skipped) - SHOWN:,} more, which {output / MANIFEST} names")
    return {"skipped": skipped} if skipped else {}


def write_manifest(
    folder: Path, tokenizer: Tokenizer, request: dict, splits: dict, **further: Any
) -> None:
    """Raises: ValueError if a split that was asked for is empty."""
    fraction = request["validation_fraction"]
    if "train" not in splits or (fraction and "validation" not in splits):
        raise ValueError(
            f"The documents fall into {' '.join(splits) or 'no split'} alone (--validation-fraction {fraction}). Give more "
            "documents or examples, another fraction, or 0 for no validation split."
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
    write_whole(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def prepare_synthetic(args: argparse.Namespace) -> str:
    """Makes the corpus of a recall task. Returns the result line."""
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
    request = {
        "synthetic": args.synthetic,
        **asdict(task),
        "examples": examples,
        "validation_fraction": args.validation_fraction,
    }
    with (
        new_folder(args.output) as folder,
        tqdm(total=examples, unit=" examples", disable=None) as bar,
    ):
        path = folder / JsonTokenizer.file
        write_whole(path, tokenizer_json(task.words()))
        splits = write_examples(task, folder, counts, args.shard_tokens, bar.update)
        answers = {"example_tokens": task.length, "per_example": task.answers}
        write_manifest(folder, load_tokenizer(path), request, splits, answers=answers)
    return describe(args.output, "wrote")


def prepare(args: argparse.Namespace) -> str:
    """Makes the corpus. Returns the result line."""
    inputs = find_inputs(args.input)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    if tokenizer:
        tokenizer.encode("", add_eos=True)  # EOS ends every document: an error if there is none
    # What the corpus is a function of, as the manifest keeps it.
    request = {
        "inputs": inputs.described,
        "text_field": args.text_field,
        "max_bytes": args.max_bytes,
        "validation_fraction": args.validation_fraction,
        "shard_tokens": args.shard_tokens,
        "tokenizer": {"sha256": tokenizer.sha256}
        if tokenizer
        else {"trained_vocab_size": args.vocab_size},
    }
    with kept_folder(args.output) as work:
        size = sum(file.size for file in inputs.files)
        others = ""
        if inputs.left_out:
            others = f" (other files in the folders, left out: {inputs.left_out:,})"
        print(f"reading {len(inputs.files):,} files ({size / 1e6:,.1f} MB){others}", flush=True)
        try:
            # Encode in the folder `work`, from where an earlier run stopped. Listing finds missing columns and datasets.
            parts = cut(list(list_spans(inputs.files, args.text_field, args.max_bytes)))
            tokenizer = make_tokenizer(work, args, parts, tokenizer)
            encoded = encode(work, args, parts, tokenizer)
            further = report_skipped(encoded, args.output)
            # The corpus appears complete.
            with new_folder(args.output) as folder:
                tokenizer.write(folder)
                splits = merge_parts(encoded, folder, tokenizer.vocab_size, args.shard_tokens)
                write_manifest(folder, tokenizer, request, splits, **further)
        except BaseException:
            if not any(work.glob("part-*.idx")) and not any(work.glob("trained-*.model")):
                shutil.rmtree(work)  # nothing that could be continued
            raise
    return describe(args.output, "wrote")


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    make = prepare_synthetic if args.synthetic else prepare
    try:
        if args.verify is not None:
            print(describe(args.verify, "verified", verify=True))
        else:
            print(make(args))
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
