"""python -m interdomain.tools.prepare_data --input stdlib --output data/stdlib

Turns text into a prepared corpus: shards of token ids in Megatron's .bin/.idx format, split into training and
validation by document, with the tokenizer and a manifest of checksums. The same text gives the same bytes, with any
number of worker processes. The folder appears under its name when everything in it is complete; a run that is killed
leaves a hidden folder beside it, and the same command goes on from there.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from interdomain.data.corpus import FORMAT, FORMAT_VERSION, MANIFEST, TokenCorpus, read_manifest, sealed
from interdomain.data.readers import READ, Inputs, find_inputs, in_validation, read_documents, tally
from interdomain.data.tokenize_parallel import Encoding, Part, cut, encode_parts, merge_parts
from interdomain.data.tokenizer import load_tokenizer
from interdomain.data.tokenizer_base import Tokenizer
from interdomain.data.tokenizer_json import CONFIG_FILE
from interdomain.data.tokenizer_sentencepiece import SentencePieceTokenizer
from interdomain.folders import kept_folder, new_folder, require_empty, write_whole

from ._cli import argument_parser, user_errors
from .train_tokenizer import DEFAULT_VOCAB_SIZE, add_input_arguments, counted, train_sentencepiece

NAMES = 3  # of each kind of file that is left out
REQUEST = "request.json"  # in an unfinished folder: what was asked for
BYTES_PER_WORKER = 4_000_000  # on the disk; for less, a process takes longer to start than to work


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    add_input_arguments(parser)
    parser.add_argument("--output", type=Path, help="the folder to make; it may not exist, or is empty")
    parser.add_argument(
        "--tokenizer",
        help="a sentencepiece .model, a Hugging Face tokenizer.json, an X.tiktoken with X.json, tiktoken:NAME, or a folder",
    )
    parser.add_argument(
        "--vocab-size", type=int, help=f"of a tokenizer trained on the text, default {DEFAULT_VOCAB_SIZE}"
    )
    parser.add_argument("--validation-fraction", type=float, default=0.02, help="of the documents, default %(default)s")
    parser.add_argument("--shard-tokens", type=int, default=1_000_000_000, help="tokens after which a shard is full")
    parser.add_argument("--workers", type=int, help="processes that encode, default one for every core that has work")
    parser.add_argument(
        "--skip-existing", action="store_true", help="if the output is this very corpus already: success"
    )
    parser.add_argument("--strict", action="store_true", help="refuse folders with files in them that are not read")
    parser.add_argument(
        "--verify", type=Path, metavar="CORPUS", help="read all of a corpus against its manifest instead"
    )
    args = parser.parse_args(argv)
    if args.verify is not None:
        return args
    if args.output is None:
        raise ValueError("Give --output, the folder to make, or --verify, a corpus to check.")
    if args.tokenizer is not None and args.vocab_size is not None:
        raise ValueError("Give --tokenizer or --vocab-size, not both: a tokenizer file has its vocabulary size.")
    if not 0 <= args.validation_fraction < 1:
        raise ValueError(f"--validation-fraction is {args.validation_fraction}, it must be at least 0 and below 1.")
    for option in ("max_bytes", "shard_tokens", "workers"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} is {getattr(args, option)}, it must be at least 1.")
    args.vocab_size = DEFAULT_VOCAB_SIZE if args.vocab_size is None else args.vocab_size
    return args


def describe(folder: Path, verb: str, verify: bool = False) -> str:
    """The result line for a complete corpus. Opening every split compares its files with the manifest."""
    manifest = read_manifest(folder)
    counts = {split: TokenCorpus(folder, split, verify=verify).num_tokens for split in manifest["splits"]}
    return (
        f"{verb} {folder} ({counts['train']:,} training tokens, {counts.get('validation', 0):,} validation tokens, "
        f"vocabulary {manifest['vocab_size']:,})"
    )


def refuse_other(found: dict, request: dict, folder: Path, advice: str) -> None:
    """Raises ValueError unless what was asked for in `folder` is `request`."""
    if found != request:
        differing = [f"{k}: {found.get(k)} there, {v} asked for" for k, v in request.items() if found.get(k) != v]
        raise ValueError(f"{folder} is of another request ({'; '.join(differing)}). {advice}")


def is_there(output: Path, request: dict, skip_existing: bool) -> bool:
    """Whether `output` is this corpus already and that is fine. Raises: ValueError, FileNotFoundError: it is something else."""
    if not skip_existing:
        require_empty(output)
    if not output.exists() or not any(output.iterdir()):
        return False
    refuse_other(read_manifest(output).get("source") or {}, request, output, "Give another --output or remove it.")
    return True


def make_tokenizer(folder: Path, args: argparse.Namespace, given: Tokenizer | None) -> Tokenizer:
    """The corpus's tokenizer, in `folder`: the given one, or one trained on the training documents."""
    path = given.write(folder) if given else folder / SentencePieceTokenizer.file
    if not path.exists():  # it does if an earlier run was killed later on
        with tqdm(unit="B", unit_scale=True, desc="training the tokenizer", disable=None) as bar:
            documents = counted(read_documents(args.input, args.text_field, args.max_bytes), bar)
            # Validation text stays unseen by the tokenizer too.
            training = (d for d in documents if not in_validation(d.text, args.validation_fraction))
            write_whole(path, train_sentencepiece(training, args.vocab_size))
    return load_tokenizer(path)


def encode(folder: Path, args: argparse.Namespace, parts: list[Part], tokenizer: Tokenizer) -> tuple[list[str], int]:
    """Encodes the parts in `folder`, but for those that an earlier run left there. Returns: as encode_parts."""
    size = sum(part.size for part in parts)
    work = min(size, args.max_bytes or size)
    workers = args.workers or max(1, min(len(os.sched_getaffinity(0)), work // BYTES_PER_WORKER))
    if done := len(list(folder.glob("part-*.json"))):
        print(f"continuing an earlier run: {done} of {len(parts)} parts are there", flush=True)
    encoding = Encoding(folder, tokenizer.path, args.text_field, args.validation_fraction, args.max_bytes)
    seconds = 0.1 if sys.stderr.isatty() else 60  # a line a minute in a log
    said = f"tokenising ({workers} process{'es' if workers > 1 else ''})"
    with tqdm(total=size, unit="B", unit_scale=True, desc=said, mininterval=seconds, delay=seconds) as bar:
        return encode_parts(parts, encoding, workers, report=lambda part: bar.update(part.size))


def build(
    work: Path, args: argparse.Namespace, request: dict, inputs: Inputs, parts: list[Part], given: Tokenizer | None
) -> None:
    """Makes the corpus at args.output by way of the folder `work`, from where an earlier run stopped."""
    # Parts of another cut must not be joined with these.
    cuts = [(part.name, [(span.file.name, span.start, span.stop) for span in part.spans]) for part in parts]
    asked = request | {"parts": hashlib.sha256(json.dumps(cuts).encode()).hexdigest()}
    if (work / REQUEST).exists():
        advice = f"Ask for that one to finish it, remove {work} to throw it away, or give another --output."
        refuse_other(json.loads((work / REQUEST).read_text(encoding="utf-8")), asked, work, advice)
    else:
        for path in work.iterdir():  # of an older version
            path.unlink()
        write_whole(work / REQUEST, json.dumps(asked).encode())
    tokenizer = make_tokenizer(work, args, given)
    names, empty = encode(work, args, parts, tokenizer)
    if (now := find_inputs(args.input).described) != inputs.described:
        changed = ", ".join(file["file"] for file in now if "file" in file and file not in inputs.described)
        raise ValueError(
            f"The input changed while it was read ({changed or 'a file is gone'}): what was made of it is neither the old text "
            f"nor the new. Remove {work} and start again when nothing writes to it."
        )
    with new_folder(args.output) as folder:
        tokenizer.write(folder)
        splits = merge_parts(work, names, folder, tokenizer.vocab_size, args.shard_tokens)
        for split in ("train", "validation") if args.validation_fraction > 0 else ("train",):
            if split not in splits:
                raise ValueError(
                    f"No document of the input falls into the {split} split (--validation-fraction "
                    f"{args.validation_fraction}, by a hash of each document's text). Give more documents or another "
                    "fraction; 0 makes no validation split."
                )
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "tokenizer": {"file": tokenizer.file, "sha256": tokenizer.sha256},
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "source": request,
            "left_out": {
                kind: {"files": len(found), "bytes": sum(n for _, n in found), "names": [n for n, _ in found[:NAMES]]}
                for kind, found in inputs.left_out.items()
            },
            "empty_documents": empty,  # left out
            "totals": {
                split: {count: sum(shard[count] for shard in shards) for count in ("documents", "tokens")}
                for split, shards in splits.items()
            },
            "splits": splits,
        }
        write_whole(folder / MANIFEST, (json.dumps(sealed(manifest), indent=2) + "\n").encode())
    if empty:
        print(f"left out {empty:,} document{'s' * (empty > 1)} without text")


def prepare(args: argparse.Namespace) -> str:
    """Makes the corpus, or finds it made. Returns the result line."""
    inputs = find_inputs(args.input)
    said = tally(inputs.left_out, NAMES)
    if inputs.left_out and args.strict:
        raise ValueError(
            f"--strict: of the input would be left out {said}. What is read: {READ}. Remove or convert the others, name by "
            "globs what to read, or leave --strict out."
        )
    given = load_tokenizer(args.tokenizer) if args.tokenizer else None
    # What the corpus is a function of, as the manifest keeps it.
    request: dict = {"inputs": inputs.described}
    request |= {
        name: getattr(args, name) for name in ("text_field", "max_bytes", "validation_fraction", "shard_tokens")
    }
    request["tokenizer"] = {"sha256": given.sha256} if given else {"trained_vocab_size": args.vocab_size}
    if is_there(args.output, request, args.skip_existing):
        return describe(args.output, "kept")
    print(f"reading {tally(inputs.files)}" + f"\nleft out {said}" * bool(inputs.left_out), flush=True)
    if given and given.eos_id is None:
        raise ValueError(
            f"The tokenizer {given.path} has no EOS token, which ends every document, or does not say which it is: name it as "
            f"eos_token (in {CONFIG_FILE} beside tokenizer.json, in X.json beside X.tiktoken), or take one that has it."
        )
    parts = cut(inputs.files, args.text_field)  # finds missing columns, libraries and datasets
    try:
        with kept_folder(args.output, wait=args.skip_existing) as work:
            try:
                build(work, args, request, inputs, parts, given)
            except BaseException:
                if not any(work.glob("part-*.json")):
                    shutil.rmtree(work)  # nothing that could be continued
                raise
    except FileExistsError:
        # Another run may have finished the same corpus meanwhile.
        if not is_there(args.output, request, args.skip_existing):
            raise
        return describe(args.output, "kept")
    return describe(args.output, "wrote")


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        print(describe(args.verify, "verified", verify=True) if args.verify is not None else prepare(args))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with what is not encoded yet", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
