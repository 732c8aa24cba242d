"""python -m interdomain.tools.prepare_data --input stdlib --output data/stdlib

Turns text into a prepared corpus: shards of token ids in Megatron's .bin/.idx format, split into training and
validation by document, with the tokenizer and a manifest of checksums. The same text gives the same bytes, with any
number of worker processes. The folder appears under its name when everything in it is complete; a run that is killed
leaves a hidden folder beside it, and the same command goes on from there.

--synthetic makes a corpus of a recall task instead, of which the answers alone are trained on (interdomain.data.synthetic).
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from interdomain.data import TokenCorpus, Tokenizer, load_tokenizer, read_manifest
from interdomain.data.corpus import FORMAT, FORMAT_VERSION, MANIFEST
from interdomain.data.readers import READ, find_inputs, in_validation, list_spans, read_documents
from interdomain.data.synthetic import TASKS, tokenizer_json, write_examples
from interdomain.data.tokenize_parallel import Encoding, Part, cut, encode_parts, merge_parts
from interdomain.data.tokenizer import JsonTokenizer, SentencePieceTokenizer, train_sentencepiece
from interdomain.folders import kept_folder, new_folder, write_whole

from ._cli import argument_parser, user_errors

REQUEST = "request.json"  # in an unfinished folder: what was asked for
BYTES_PER_WORKER = 4_000_000  # on the disk; for less, a process takes longer to start than to work


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    what = f"stdlib; files, folders and globs of {READ}; hf:NAME[@REVISION][:CONFIG[:SPLIT]]"
    parser.add_argument("--input", nargs="+", default=["stdlib"], help=what)
    parser.add_argument("--text-field", default="text", help="of rows, default %(default)s")
    parser.add_argument("--max-bytes", type=int, help="of the input's files to read, in whole pieces, default all")
    tokenizer = parser.add_mutually_exclusive_group()
    kinds = "a .model, a tokenizer.json, an X.tiktoken with X.json, tiktoken:NAME, or a folder that holds one"
    tokenizer.add_argument("--tokenizer", help=kinds)
    tokenizer.add_argument("--vocab-size", type=int, default=2048, help="of one trained on the text: %(default)s")
    parser.add_argument("--validation-fraction", type=float, default=0.02, help="of the documents, default %(default)s")
    parser.add_argument("--shard-tokens", type=int, default=1_000_000_000, help="tokens after which a shard is full")
    parser.add_argument("--workers", type=int, help="processes that encode, default one for every core that has work")
    made = parser.add_argument_group(
        "a recall task in place of --input (then text, tokenizer and workers are not asked)"
    )
    made.add_argument("--synthetic", choices=TASKS, help="which")
    made.add_argument(
        "--synthetic-length", type=int, metavar="T", help="tokens of an example; set training.seq_len to it"
    )
    made.add_argument(
        "--synthetic-items", type=int, metavar="P", help="to remember in an example: pairs, tokens, entries"
    )
    made.add_argument("--synthetic-vocab", type=int, metavar="V", help="words of the vocabulary")
    made.add_argument("--synthetic-examples", type=int, default=60_000, metavar="N", help="of both splits: %(default)s")
    made.add_argument("--synthetic-seed", type=int, default=0, metavar="SEED", help="other examples for another one")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--output", type=Path, help="the folder to make; it may not exist, or is empty")
    task.add_argument("--verify", type=Path, metavar="CORPUS", help="read all of a corpus against its manifest")
    args = parser.parse_args(argv)
    if not 0 <= args.validation_fraction < 1:
        raise ValueError(f"--validation-fraction is {args.validation_fraction}, it must be at least 0 and below 1.")
    return args


def describe(folder: Path, verb: str, verify: bool = False) -> str:
    """The result line for a complete corpus. Opening every split compares its files with the manifest."""
    manifest = read_manifest(folder)
    counts = {split: TokenCorpus(folder, split, verify=verify).num_tokens for split in manifest["splits"]}
    return (
        f"{verb} {folder} ({counts['train']:,} training tokens, {counts.get('validation', 0):,} validation tokens, "
        f"vocabulary {manifest['vocab_size']:,})"
    )


def make_tokenizer(folder: Path, args: argparse.Namespace, given: Tokenizer | None) -> Tokenizer:
    """The corpus's tokenizer, in `folder`: the given one, or one trained on the training documents."""
    path = given.write(folder) if given else folder / SentencePieceTokenizer.file
    if not path.exists():  # it does if an earlier run was killed later on
        documents = read_documents(args.input, args.text_field, args.max_bytes)
        documents = tqdm(documents, desc="training the tokenizer", unit=" documents", disable=None)
        # Validation text stays unseen by the tokenizer too.
        training = (text for text in documents if not in_validation(text, args.validation_fraction))
        write_whole(path, train_sentencepiece(training, args.vocab_size))
    return load_tokenizer(path)


def encode(folder: Path, args: argparse.Namespace, parts: list[Part], tokenizer: Tokenizer) -> None:
    """Encodes the parts in `folder`, but for those that an earlier run left there."""
    size = sum(part.size for part in parts)
    workers = args.workers or max(1, min(len(os.sched_getaffinity(0)), size // BYTES_PER_WORKER))
    if done := sum(part.is_encoded(folder) for part in parts):
        print(f"continuing an earlier run: {done} of {len(parts)} parts are there", flush=True)
    encoding = Encoding(folder, tokenizer.path, args.text_field, args.validation_fraction)
    seconds = 0.1 if sys.stderr.isatty() else 60  # a line a minute in a log
    said = f"tokenising ({workers} process{'es' if workers > 1 else ''})"
    with tqdm(total=size, unit="B", unit_scale=True, desc=said, mininterval=seconds, delay=seconds) as bar:
        encode_parts(parts, encoding, workers, report=lambda part: bar.update(part.size))


def check_request(work: Path, request: dict) -> None:
    """Raises ValueError if an earlier run left something else in `work` than what is asked for now."""
    path = work / REQUEST
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else request
    names = [name for name in found | request if found.get(name) != request.get(name)]
    if differing := [f"{name}: {found.get(name)} there, {request.get(name)} asked for" for name in names]:
        raise ValueError(
            f"{work} is of another request ({'; '.join(differing)}). Ask for that one to finish it, remove {work} to throw "
            "it away, or give another --output."
        )
    write_whole(path, json.dumps(request).encode())


def write_manifest(folder: Path, tokenizer: Tokenizer, request: dict, splits: dict, **further: dict) -> None:
    """Raises: ValueError if a split that was asked for is empty."""
    fraction = request["validation_fraction"]
    if "train" not in splits or (fraction and "validation" not in splits):
        raise ValueError(
            f"The documents fall into {' '.join(splits) or 'no split'} alone (--validation-fraction {fraction}, of text by a "
            "hash of each). Give more, or another fraction; 0: no validation."
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


def build(work: Path, args: argparse.Namespace, request: dict, parts: list[Part], given: Tokenizer | None) -> None:
    """Makes the corpus at args.output by way of the folder `work`, from where an earlier run stopped."""
    check_request(work, request)
    tokenizer = make_tokenizer(work, args, given)
    encode(work, args, parts, tokenizer)
    with new_folder(args.output) as folder:
        tokenizer.write(folder)
        splits = merge_parts(work, parts, folder, tokenizer.vocab_size, args.shard_tokens)
        write_manifest(folder, tokenizer, request, splits)


def prepare_synthetic(args: argparse.Namespace) -> str:
    """Makes the corpus of a recall task. Returns the result line."""
    kind = TASKS[args.synthetic]
    given = {name: getattr(args, f"synthetic_{name}") for name in kind.defaults}
    task = kind(**kind.defaults | {name: n for name, n in given.items() if n is not None}, seed=args.synthetic_seed)
    examples, fraction, shard_tokens = args.synthetic_examples, args.validation_fraction, args.shard_tokens
    request = {"synthetic": args.synthetic, **asdict(task), "examples": examples, "validation_fraction": fraction}
    counts = {"validation": round(examples * fraction)}
    counts["train"] = examples - counts["validation"]
    with new_folder(args.output) as folder, tqdm(total=examples, unit=" examples", disable=None) as bar:
        path = folder / JsonTokenizer.file
        write_whole(path, tokenizer_json(task.words()))
        splits = write_examples(task, folder, counts, shard_tokens, bar.update)
        answers = {"example_tokens": task.length, "per_example": task.answers}
        write_manifest(folder, load_tokenizer(path), request, splits, answers=answers)
    return describe(args.output, "wrote")


def prepare(args: argparse.Namespace) -> str:
    """Makes the corpus. Returns the result line."""
    inputs = find_inputs(args.input)
    given = load_tokenizer(args.tokenizer) if args.tokenizer else None
    if given:
        given.encode("", add_eos=True)  # EOS ends every document: an error if there is none
    # What the corpus is a function of, as the manifest keeps it.
    options = ("text_field", "max_bytes", "validation_fraction", "shard_tokens")
    request = {"inputs": inputs.described} | {name: getattr(args, name) for name in options}
    request["tokenizer"] = {"sha256": given.sha256} if given else {"trained_vocab_size": args.vocab_size}
    with kept_folder(args.output) as work:
        size = sum(file.size for file in inputs.files)
        others = f", not {inputs.left_out:,} others in the folders" if inputs.left_out else ""
        print(f"reading {len(inputs.files):,} files ({size / 1e6:,.1f} MB){others}", flush=True)
        try:
            # Finds missing columns and datasets.
            parts = cut(list(list_spans(inputs.files, args.text_field, args.max_bytes)))
            build(work, args, request, parts, given)
        except BaseException:
            if not any(work.glob("part-*.idx")):
                shutil.rmtree(work)  # nothing that could be continued
            raise
    return describe(args.output, "wrote")


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    make = prepare_synthetic if args.synthetic else prepare
    try:
        print(describe(args.verify, "verified", verify=True) if args.verify is not None else make(args))
    except ModuleNotFoundError as e:
        raise ValueError(f"{e}, which this input or tokenizer needs: pip install 'interdomain[data]' brings it.") from e
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with what is not encoded yet", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
