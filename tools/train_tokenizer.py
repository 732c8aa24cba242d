"""python -m interdomain.tools.train_tokenizer --input stdlib --vocab-size 2048 --output data/tokenizer.model

Trains a sentencepiece BPE tokenizer in Llama 2's style: bytes stand in for what the vocabulary lacks, digits stand
alone, text is not normalised, whitespace survives exactly. The same input gives the same file.
"""

import argparse
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from tqdm import tqdm

from interdomain.data.readers import READ, Document, find_inputs, read_documents, tally
from interdomain.folders import write_whole

from ._cli import argument_parser, user_errors

DEFAULT_VOCAB_SIZE = 2048
# 256 bytes, 3 control tokens and a few dozen characters; sentencepiece names the exact bound for a text.
SMALLEST_VOCAB_SIZE = 300


def training_lines(documents: Iterable[Document]) -> Iterator[str]:
    """Lines for the trainer, which puts a space before each; in running text only a document's first has one."""
    for document in documents:
        for line in document.text.splitlines():
            # Without one space of its indentation a line comes out as it stands in running text.
            yield line[1:] if line.startswith(" ") else line


def train_sentencepiece(documents: Iterable[Document], vocab_size: int) -> bytes:
    """A sentencepiece model file trained on the documents: a function of these and of vocab_size alone.

    Raises: ValueError if the text does not fit the vocabulary size.
    """
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise ValueError(
            f"A vocabulary of {vocab_size} is too small: 256 bytes come first, so give {SMALLEST_VOCAB_SIZE} or more."
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=training_lines(documents),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=0.99995,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            add_dummy_prefix=True,
            remove_extra_whitespaces=False,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=2,  # fixed: the file records it
            minloglevel=2,
        )
    except RuntimeError as e:
        # "... Vocabulary size too high (5000). Please set it to a value <= 1234." and the like; the rest is its source
        # line.
        reason = str(e).rsplit("] ", 1)[-1].split(" Increase vocab_size")[0].strip() or "it saw no text."
        raise ValueError(
            f"A vocabulary of {vocab_size} cannot be trained on this text: {reason} Give another --vocab-size or more "
            "text."
        ) from e
    return model.getvalue()


def counted(documents: Iterable[Document], bar: Any) -> Iterator[Document]:
    """The documents, moving a progress bar on."""
    for document in documents:
        yield document
        bar.update(document.source_bytes)


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """--input, --text-field and --max-bytes."""
    what = f"stdlib; files, folders and globs of {READ}; hf:NAME[@REVISION][:CONFIG[:SPLIT]]"
    parser.add_argument("--input", nargs="+", default=["stdlib"], help=what)
    parser.add_argument("--text-field", default="text", help="of rows, default %(default)s")
    parser.add_argument("--max-bytes", type=int, help="of text to take, default all")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, type=Path, help="the .model file to write")
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, help="default %(default)s")
    return parser.parse_args(argv)


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.output.suffix != ".model":
        raise ValueError(f"--output is {args.output}, it must end in .model, as sentencepiece's files do.")
    if args.output.exists():
        raise ValueError(f"{args.output} exists already and is not overwritten; remove it or give another --output.")
    inputs = find_inputs(args.input)
    size = sum(file.size for file in inputs.files)
    if inputs.left_out:
        print(f"left out {tally(inputs.left_out, names=3)}", flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)  # before an hour's training
    with tqdm(total=size, unit="B", unit_scale=True, desc="reading", disable=None) as bar:
        documents = counted(read_documents(args.input, args.text_field, args.max_bytes), bar)
        model = train_sentencepiece(documents, args.vocab_size)
    write_whole(args.output, model)
    print(f"wrote {args.output} (vocabulary {args.vocab_size:,}, {len(model) / 1e3:.0f} KB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
