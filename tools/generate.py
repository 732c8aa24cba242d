"""interdomain generate exports/debug --prompt "def main(" --max-tokens 200

Continue text with an exported model.

The model reads the prompt in chunks and then writes token by token, from its state. One prompt is
printed as it is written; several are decoded together and printed at the end. TorchTitan is not
needed.

    interdomain generate exports/debug --prompt "import " --prompt "class " --temperature 0
    head -c 2000 README.md | interdomain generate exports/debug

Documentation: docs/checkpoints.md
"""

import argparse
import sys
import time

from interdomain.checkpoint.pretrained import DTYPES, load_pretrained
from interdomain.data import StreamDecoder
from interdomain.model.generation import Sampling, generate
from interdomain.tools import _cli


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = _cli.argument_parser(__doc__, "FOLDER")
    p.add_argument(
        "folder",
        type=_cli.path_argument,
        metavar="FOLDER",
        help=_cli.EXPORTED_MODEL,
    )
    p.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="may be repeated (default: read standard input)",
    )
    p.add_argument(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens to write per prompt, at least 1",
    )
    p.add_argument("--no-stop", action="store_true", help="do not stop at the end-of-text token")
    sampling = p.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0 takes the most probable token; higher values give more varied text",
    )
    sampling.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="N",
        help="of the N most probable tokens; 0: of all",
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="sample from the most probable tokens whose probabilities sum to P, above 0 and at most 1",
    )
    sampling.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the random numbers",
    )
    _cli.add_device(p)
    _cli.add_dtype(p, DTYPES)
    return p.parse_args(argv)


def read_prompts(prompts: list[str] | None) -> list[str]:
    """Returns the texts of --prompt, or standard input as one text.

    Args:
        prompts: The texts of --prompt; None if it was not given.

    Raises:
        ValueError: Standard input is empty, or not UTF-8.
    """
    if prompts:
        return prompts
    print("[no --prompt: reading the text from standard input]", file=sys.stderr)
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise ValueError(
            "standard input is empty. Give a text, or --prompt '' for a text from nothing."
        )
    return [text]


def show(text: str, end: str = "") -> None:
    """Prints text at once.

    A terminal gets no control characters, a file or a pipe gets every byte.

    Args:
        text: The text.
        end: The text after it, as in `print`.
    """
    if sys.stdout.isatty():
        text = _cli.visible(text)
    print(text, end=end, flush=True)


@_cli.user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    # Read the options and the prompts before the model, which takes long to load.
    args = parse(argv)
    _cli.require_at_least(args, max_tokens=1, top_k=0)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    device = _cli.choose_device(args.device)
    prompts = read_prompts(args.prompt)
    model, tokenizer = load_pretrained(args.folder, device=device, dtype=DTYPES.get(args.dtype))
    _cli.note_documents(args.folder, tokenizer)

    # Encode the prompts. A text begins as a document in training.
    texts = [tokenizer.documents.start + tokenizer.encode(prompt) for prompt in prompts]
    if not all(texts):
        raise ValueError(
            "in this model's training nothing stood before a text: an empty prompt has no tokens. Give one."
        )
    stop = None if args.no_stop else tokenizer.documents.stop
    steps = generate(
        model,
        texts,
        max_tokens=args.max_tokens,
        sampling=sampling,
        seed=args.seed,
        stop=stop,
        vocab_size=tokenizer.vocab_size,
    )

    # One prompt is printed as it is written, several at the end.
    stream = None
    if len(prompts) == 1:
        stream = StreamDecoder(tokenizer, after=texts[0])
        show(prompts[0])

    # Each step gives one token per text. Ctrl-C ends the loop, and what was written is shown.
    status = 0
    written = 0
    began = time.perf_counter()
    try:
        for row in steps:
            for text, token in zip(texts, row, strict=True):
                if token is None:  # this text has ended
                    continue
                written += 1
                if token != stop:
                    text.append(token)
                    if stream:
                        show(stream.push(token))
    except KeyboardInterrupt:
        status = 130
    if stream:
        show(stream.flush(), end="\n")
    else:
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
            show(f"=== {number}: {prompt!r}\n{tokenizer.decode(text)}\n", end="\n")

    seconds = time.perf_counter() - began
    print(f"[{written} tokens in {seconds:.1f} s]", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
