"""python -m interdomain.tools.prepare_data --input stdlib --output data/stdlib

Turns text into a prepared corpus: shards of token ids in Megatron's .bin/.idx format, split into training and
validation by document, with the tokenizer and a manifest of checksums. The same text gives the same bytes, with any
number of worker processes. The folder appears under its name when everything in it is whole; a run that is killed
leaves a hidden folder beside it, and the same command goes on from there.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from tqdm import tqdm

from interdomain.data.corpus import FORMAT, FORMAT_VERSION, MANIFEST, TokenCorpus, read_manifest, sealed
from interdomain.data.documents import (
    READ,
    describe_inputs,
    in_validation,
    left_out,
    list_files,
    read_documents,
    read_in,
    tally,
)
from interdomain.data.pieces import check_files
from interdomain.data.preparation import JOURNAL, Encoding, Journal, write_splits
from interdomain.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from interdomain.data.tokenizer_json import CONFIG_FILE
from interdomain.folders import kept_folder, write_whole

from ._cli import argument_parser, user_errors
from .train_tokenizer import DEFAULT_VOCAB_SIZE, counted, train_sentencepiece

LOG_SECONDS = 60.0
NAMES = 3  # of each kind of file that is left out
BYTES_PER_WORKER = 4_000_000  # on the disk; for less, a process takes longer to start than to work


def parse(argv):
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        default=["stdlib"],
        help=f"stdlib; files, folders and globs of {READ}; hf:NAME[@REVISION][:CONFIG[:SPLIT]]",
    )
    parser.add_argument("--output", type=Path, help="the folder to make; it may not exist, or is empty")
    parser.add_argument(
        "--tokenizer",
        help="a sentencepiece .model, a Hugging Face tokenizer.json, an X.tiktoken with X.json, tiktoken:NAME, or a folder",
    )
    parser.add_argument(
        "--vocab-size", type=int, help=f"of a tokenizer trained on the text, default {DEFAULT_VOCAB_SIZE}"
    )
    parser.add_argument("--validation-fraction", type=float, default=0.02, help="of the documents, default %(default)s")
    parser.add_argument("--text-field", default="text", help="of rows, default %(default)s")
    parser.add_argument("--max-bytes", type=int, default=None, help="of text to take, default all")
    parser.add_argument("--shard-tokens", type=int, default=1_000_000_000, help="tokens after which a shard is full")
    parser.add_argument("--workers", type=int, help="processes that encode, default one for every core that has work")
    parser.add_argument(
        "--skip-existing", action="store_true", help="if the output is this very corpus already: success"
    )
    parser.add_argument("--strict", action="store_true", help="refuse folders with files in them that are not read")
    parser.add_argument("--restart", action="store_true", help="throw an unfinished preparation away")
    parser.add_argument(
        "--verify", type=Path, metavar="CORPUS", help="read a whole corpus against its manifest instead"
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
    if args.output.name in ("", ".."):
        raise ValueError(f"--output is {args.output}, it must end in the name of the folder to make, like data/stdlib.")
    for option in ("max_bytes", "shard_tokens", "workers"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} is {getattr(args, option)}, it must be at least 1.")
    return args


def build_request(args):
    """What the corpus is a function of, as the manifest keeps it: --skip-existing compares it."""
    if args.tokenizer is not None:
        tokenizer = {"sha256": load_tokenizer(args.tokenizer).sha256}
    else:
        tokenizer = {"trained_vocab_size": DEFAULT_VOCAB_SIZE if args.vocab_size is None else args.vocab_size}
    return {
        "inputs": describe_inputs(args.input),
        "text_field": args.text_field,
        "max_bytes": args.max_bytes,
        "validation_fraction": args.validation_fraction,
        "shard_tokens": args.shard_tokens,
        "tokenizer": tokenizer,
    }


def describe(folder, verb):
    """The result line for a whole corpus. Opening every split checks its files."""
    manifest = read_manifest(folder)
    counts = {split: TokenCorpus(folder, split).num_tokens for split in manifest["splits"]}
    return (
        f"{verb} {folder} ({counts['train']:,} training tokens, {counts.get('validation', 0):,} validation tokens, "
        f"vocabulary {manifest['vocab_size']:,})"
    )


def check_output(output, request, skip_existing):
    """True if `output` is this corpus already and that is fine, False if it can be made.

    Raises: ValueError, FileNotFoundError: it is there and is something else, or is not whole.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    if not output.is_dir():
        raise ValueError(f"The output {output} is a file; give a folder that does not exist yet.")
    if not skip_existing:
        raise ValueError(
            f"The output folder {output} is not empty, and nothing is overwritten. Give another --output, remove the "
            "folder, or pass --skip-existing to keep a corpus that was prepared there with the same options."
        )
    found = read_manifest(output).get("source")
    if found != request:
        found = found if isinstance(found, dict) else {}
        differing = [f"{k}: {found.get(k)} there, {v} asked for" for k, v in request.items() if found.get(k) != v]
        raise ValueError(
            f"{output} holds a corpus of another request ({'; '.join(differing)}). Give another --output or remove the "
            "folder."
        )
    return True


def is_whole(folder, request):
    """Whether an earlier run was killed with nothing left to do but to give the folder its name."""
    whole = (folder / MANIFEST).exists() and not (folder / JOURNAL).exists()
    return whole and read_manifest(folder)["source"] == request


def begin(folder, args, request):
    """The journal of the preparation in `folder`: of the one that is there, or of a new one.

    Raises: ValueError if what is there is another.
    """
    journal = None if args.restart else Journal.read(folder)
    if journal is None:
        for path in folder.iterdir():
            path.unlink()
        journal = Journal.begin(request)
        journal.write(folder)
    elif differing := journal.differences(request):
        raise ValueError(
            f"{folder} holds an unfinished preparation of another request ({'; '.join(differing)}). Ask for that one to "
            "finish it, pass --restart to throw it away, or give another --output."
        )
    return journal


def make_tokenizer(folder, args, files):
    """The corpus's tokenizer, in `folder`: the given one, or one trained on the training documents."""
    if args.tokenizer is not None:
        return load_tokenizer(load_tokenizer(args.tokenizer).write(folder))
    path = folder / TOKENIZER_FILE
    if not path.exists():  # there already if an earlier run was killed later on
        size = total_size(files, args.max_bytes)
        with tqdm(total=size, unit="B", unit_scale=True, desc="training the tokenizer", disable=None) as bar:
            documents = counted(read_documents(args.input, args.text_field, args.max_bytes), bar)
            # Validation text stays unseen by the tokenizer too.
            training = (d for d in documents if not in_validation(d.text, args.validation_fraction))
            model = train_sentencepiece(training, DEFAULT_VOCAB_SIZE if args.vocab_size is None else args.vocab_size)
        write_whole(path, model)
    return load_tokenizer(path)


def require_eos(tokenizer):
    if tokenizer.eos_id is None:
        raise ValueError(
            f"The tokenizer {tokenizer.path} has no EOS token, which ends every document, or does not say which it is: name "
            f"it as eos_token (in {CONFIG_FILE} beside tokenizer.json, in X.json beside X.tiktoken), or take one that has it."
        )


def total_size(files, max_bytes):
    """Bytes on the disk, for a progress bar; None if that is not known."""
    size = sum(file.size for file in files)
    return (min(size, max_bytes) if max_bytes else size) if all(file.path for file in files) else None


class Progress:
    """A bar over the input with the tokens per second of this run; in a log, where a bar is disabled, a line a minute."""

    def __init__(self, total, done, by_source, workers):
        self.by_source, self.total, self.first, self.done, self.tokens = by_source, total, done, done, 0
        self.started = self.said = time.monotonic()
        said = f"tokenising ({workers} process{'es' if workers > 1 else ''})"
        self.bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=said, disable=None)

    def __call__(self, size, source_bytes, tokens):
        step = source_bytes if self.by_source else size
        self.tokens, self.done = self.tokens + tokens, self.done + step
        self.bar.set_postfix_str(f"{self.rate:,.0f} tokens/s", refresh=False)
        self.bar.update(step)
        if self.bar.disable and time.monotonic() - self.said >= LOG_SECONDS:
            self.said = time.monotonic()
            left = ""
            if self.total and self.done > self.first:
                seconds = (self.total - self.done) * (self.said - self.started) / (self.done - self.first)
                left = f" of {self.total / 1e6:,.0f} MB, {tqdm.format_interval(max(0, seconds))} left"
            print(f"{self.done / 1e6:,.0f}{left}, {self.rate:,.0f} tokens/s", file=sys.stderr, flush=True)

    @property
    def rate(self):
        return self.tokens / max(time.monotonic() - self.started, 1e-9)


def build(folder, args, request, files, skipped):
    """Writes a whole corpus into `folder`, from where an earlier run stopped. Returns tokens per second of this run."""
    if is_whole(folder, request):
        return ""
    journal = begin(folder, args, request)
    tokenizer = make_tokenizer(folder, args, files)
    require_eos(tokenizer)
    size = total_size(files, args.max_bytes)
    workers = args.workers or max(1, min(len(os.sched_getaffinity(0)), (size or 2**60) // BYTES_PER_WORKER))
    if done := tuple(journal.after) != (0, 0):
        tqdm.write(f"continuing after {journal.source_bytes:,} bytes of text", file=sys.stderr)
    by_source = args.max_bytes is not None
    progress = Progress(size, journal.source_bytes if by_source else journal.size, by_source, workers)
    with progress.bar:
        splits = write_splits(
            folder,
            journal,
            files,
            Encoding(str(tokenizer.path), args.text_field, args.validation_fraction),
            shard_tokens=args.shard_tokens,
            workers=workers,
            max_bytes=args.max_bytes,
            report=progress,
        )
    if (now := describe_inputs(args.input)) != request["inputs"]:
        changed = ", ".join(file["file"] for file in now if "file" in file and file not in request["inputs"])
        raise ValueError(
            f"The input changed while it was read ({changed or 'a file is gone'}): what was made of it is neither the old text "
            "nor the new. Start again with --restart when nothing writes to it."
        )
    for split in ("train", "validation"):
        if split not in splits and (split == "train" or args.validation_fraction > 0):
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
            kind: {"files": len(found), "bytes": sum(size for _, size in found), "names": [n for n, _ in found[:NAMES]]}
            for kind, found in skipped.items()
        },
        "empty_documents": journal.empty,  # left out
        "totals": {
            split: {count: sum(shard[count] for shard in shards) for count in ("documents", "tokens")}
            for split, shards in splits.items()
        },
        "splits": splits,
    }
    if journal.empty:
        tqdm.write(f"left out {journal.empty:,} document{'s' * (journal.empty > 1)} without text")
    write_whole(folder / MANIFEST, (json.dumps(sealed(manifest), indent=2) + "\n").encode())
    for leftover in (*folder.glob("*.partial"), folder / JOURNAL):
        leftover.unlink(missing_ok=True)
    return "" if done else f", {progress.rate:,.0f} tokens/s"


def verify(folder):
    """Reads every byte of a corpus against its manifest. Raises ValueError, FileNotFoundError naming what is wrong."""
    manifest = read_manifest(folder)
    for split, shards in tqdm(manifest["splits"].items(), desc="verifying", unit="split", disable=None):
        corpus = TokenCorpus(folder, split, verify=True)
        assert len(corpus.shards) == len(shards)
    return describe(folder, "verified")


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    if args.verify is not None:
        print(verify(args.verify))
        return 0
    files, skipped = list_files(args.input), left_out(args.input)
    if skipped and args.strict:
        raise ValueError(
            f"--strict: of the input would be left out {tally(skipped, NAMES)}. What is read: {READ}. Remove or convert the "
            "others, name by globs what to read, or leave --strict out."
        )
    request = build_request(args)
    if check_output(args.output, request, args.skip_existing):
        print(describe(args.output, "kept"))
        return 0
    print(f"reading {tally(read_in(files))}")
    if skipped:
        print(f"left out {tally(skipped, NAMES)}", flush=True)
    check_files(files, args.text_field)
    if args.tokenizer is not None:
        require_eos(load_tokenizer(args.tokenizer))
    try:
        with kept_folder(args.output, wait=args.skip_existing) as folder:
            try:
                rate = build(folder, args, request, files, skipped)
            except BaseException:
                if (journal := Journal.read(folder)) is None or journal.splits is None:
                    shutil.rmtree(folder)  # nothing that could be continued
                raise
    except KeyboardInterrupt:
        print(
            "interrupted; the same command goes on from the last note in the journal, if there is one", file=sys.stderr
        )
        return 130
    except FileExistsError:
        # Another run may have finished the same corpus meanwhile.
        if not check_output(args.output, request, args.skip_existing):
            raise
        print(describe(args.output, "kept"))
        return 0
    print(describe(args.output, "wrote")[:-1] + f"{rate})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
