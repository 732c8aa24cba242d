"""python -m interdomain.tools.prepare_data --input stdlib --output data/stdlib

Turns text into a prepared corpus: shards of token ids in Megatron's .bin/.idx format, split into training and
validation by document, with the tokenizer and a manifest of checksums. The same text gives the same bytes. The folder
appears under its name when everything in it is whole; a run that dies leaves a hidden folder beside it, which the next
one removes.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

from tqdm import tqdm

from interdomain.data.corpus import FORMAT, FORMAT_VERSION, MANIFEST, TokenCorpus, read_manifest
from interdomain.data.documents import describe_inputs, in_validation, list_files, read_documents
from interdomain.data.indexed import IndexedDatasetWriter, file_sha256
from interdomain.data.tokenizer import TOKENIZER_FILE, SentencePieceTokenizer, load_tokenizer
from interdomain.folders import new_folder, write_whole

from ._cli import user_errors
from .train_tokenizer import DEFAULT_VOCAB_SIZE, counted, train_sentencepiece

SPLITS = ("train", "validation")
BATCH_DOCUMENTS = 64  # encoded at once, by every core


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1], usage=__doc__.splitlines()[0])
    parser.add_argument(
        "--input", nargs="+", default=["stdlib"], help="stdlib, or files and globs of .txt .py .md .jsonl"
    )
    parser.add_argument("--output", required=True, type=Path, help="the folder to make; it may not exist, or is empty")
    parser.add_argument("--tokenizer", type=Path, help="a sentencepiece .model file, or a folder with one")
    parser.add_argument(
        "--vocab-size", type=int, help=f"of a tokenizer trained on the text, default {DEFAULT_VOCAB_SIZE}"
    )
    parser.add_argument("--validation-fraction", type=float, default=0.02, help="of the documents, default %(default)s")
    parser.add_argument("--text-field", default="text", help="of .jsonl rows, default %(default)s")
    parser.add_argument("--max-bytes", type=int, default=None, help="of text to take, default all")
    parser.add_argument("--shard-tokens", type=int, default=1_000_000_000, help="tokens after which a shard is full")
    parser.add_argument(
        "--skip-existing", action="store_true", help="if the output is this very corpus already: success"
    )
    args = parser.parse_args(argv)
    if args.tokenizer is not None and args.vocab_size is not None:
        raise ValueError("Give --tokenizer or --vocab-size, not both: a tokenizer file has its vocabulary size.")
    if not 0 <= args.validation_fraction < 1:
        raise ValueError(f"--validation-fraction is {args.validation_fraction}, it must be at least 0 and below 1.")
    if args.output.name in ("", ".."):
        raise ValueError(f"--output is {args.output}, it must end in the name of the folder to make, like data/stdlib.")
    for option in ("max_bytes", "shard_tokens"):
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


class ShardedWriter:
    """Documents of one split into shards `train-00000`, `train-00001`, ...; a new one begins when the last is full."""

    def __init__(self, folder, split, vocab_size, shard_tokens):
        self.folder, self.split, self.vocab_size, self.shard_tokens = folder, split, vocab_size, shard_tokens
        self.shards, self._writer = [], None

    def add_document(self, tokens):
        if self._writer is None:
            prefix = self.folder / f"{self.split}-{len(self.shards):05d}"
            self._writer = IndexedDatasetWriter(prefix, self.vocab_size)
        self._writer.add_document(tokens)
        if self._writer.num_tokens >= self.shard_tokens:
            self.finalize()

    def finalize(self):
        if self._writer is not None:
            self.shards.append(self._writer.finalize())
            self._writer = None


def write_shards(folder, args, tokenizer, size):
    """Tokenises every document, ended by EOS, into the split it belongs to. Returns {split: [ShardInfo, ...]}."""
    writers = {s: ShardedWriter(folder, s, tokenizer.vocab_size, args.shard_tokens) for s in SPLITS}
    with tqdm(total=size, unit="B", unit_scale=True, desc="tokenising", disable=None) as bar:
        documents = counted(read_documents(args.input, args.text_field, args.max_bytes), bar)
        while batch := list(itertools.islice(documents, BATCH_DOCUMENTS)):
            rows = tokenizer.encode_batch([document.text for document in batch], add_eos=True)
            for document, row in zip(batch, rows, strict=True):
                split = SPLITS[in_validation(document.text, args.validation_fraction)]
                writers[split].add_document(row)
    for split, writer in writers.items():
        writer.finalize()
        if not writer.shards and (split == "train" or args.validation_fraction > 0):
            raise ValueError(
                f"No document of the input falls into the {split} split (--validation-fraction "
                f"{args.validation_fraction}, by a hash of each document's text). Give more documents or another "
                "fraction; 0 makes no validation split."
            )
    return {split: writer.shards for split, writer in writers.items() if writer.shards}


def build(folder, args, request):
    """Writes a whole corpus into the empty `folder`."""
    size = sum(path.stat().st_size for _, path in list_files(args.input))
    size = min(size, args.max_bytes or size)
    if args.tokenizer is not None:
        model = load_tokenizer(args.tokenizer).path.read_bytes()
    else:
        with tqdm(total=size, unit="B", unit_scale=True, desc="training the tokenizer", disable=None) as bar:
            documents = counted(read_documents(args.input, args.text_field, args.max_bytes), bar)
            # Validation text stays unseen by the tokenizer too.
            training = (d for d in documents if not in_validation(d.text, args.validation_fraction))
            model = train_sentencepiece(training, DEFAULT_VOCAB_SIZE if args.vocab_size is None else args.vocab_size)
    write_whole(folder / TOKENIZER_FILE, model)
    tokenizer = SentencePieceTokenizer(folder / TOKENIZER_FILE)
    if tokenizer.eos_id is None:
        raise ValueError(
            f"The tokenizer {args.tokenizer} has no EOS token, which ends every document; take one that has it."
        )
    splits = write_shards(folder, args, tokenizer, size)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tokenizer": {"file": TOKENIZER_FILE, "sha256": file_sha256(folder / TOKENIZER_FILE)},
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "source": request,
        "splits": {split: [shard.to_dict() for shard in shards] for split, shards in splits.items()},
    }
    write_whole(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


@user_errors
def main(argv=None) -> int:
    args = parse_arguments(argv)
    request = build_request(args)
    if check_output(args.output, request, args.skip_existing):
        print(describe(args.output, "kept"))
        return 0
    try:
        with new_folder(args.output) as folder:
            build(folder, args, request)
    except FileExistsError:
        # Another run may have finished the same corpus meanwhile.
        if not check_output(args.output, request, args.skip_existing):
            raise
        print(describe(args.output, "kept"))
        return 0
    print(describe(args.output, "wrote"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
