"""python -m interdomain.tools.generate exports/debug --prompt "def main(" --max-tokens 200

Continue text with a standalone folder, through the recurrent state. Needs torch, safetensors and sentencepiece; no TorchTitan.
One prompt streams as it is written; several are decoded together and printed as each of them ends. A long prompt is read
once: --save-state FILE keeps what the model holds after it, and --load-state FILE goes on from there, with --prompt for more
text or without.
"""

import sys
import time
from pathlib import Path

import torch

from interdomain.data import StreamDecoder
from interdomain.model.generation import PREFILL_CHUNK, Sampling, continuation, read
from interdomain.model.pretrained import DTYPES, load_pretrained
from interdomain.model.saved_state import SavedState, load_state, save_state

from ._cli import add_device, argument_parser, choose_device, user_errors, visible


def parse(argv):
    p = argument_parser(__doc__)
    p.add_argument("folder", help="standalone folder (made by interdomain.tools.convert)")
    p.add_argument("--prompt", action="append", help="text to continue; may be repeated. Default: read standard input")
    p.add_argument("--prompt-file", type=Path, help="a prompt from a file (UTF-8)")
    p.add_argument("--max-tokens", type=int, default=128, help="per prompt (default %(default)s); 0 with --save-state")
    p.add_argument("--endless", action="store_true", help="write until Ctrl-C")
    p.add_argument("--temperature", type=float, default=0.8, help="0 for greedy (default %(default)s)")
    p.add_argument("--top-k", type=int, default=0, help="keep the k most probable tokens; 0 keeps all")
    p.add_argument("--top-p", type=float, default=0.95, help="keep the most probable up to this mass (%(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--no-stop", action="store_true", help="write on after the end-of-text token")
    add_device(p)
    p.add_argument("--dtype", choices=DTYPES, help="default: as stored; the dynamics stay float32")
    p.add_argument("--prefill-chunk", type=int, default=PREFILL_CHUNK, help="tokens of a prompt per pass")
    p.add_argument("--save-state", type=Path, help="file to write: the state after the prompts (it must not exist)")
    p.add_argument("--load-state", type=Path, help="file to go on from, saved with this folder's model")
    p.add_argument("--compile", action="store_true", help="compile the step: half a minute first, faster then")
    p.add_argument("--no-graph", action="store_true", help="decode without a CUDA graph")
    return p.parse_args(argv)


def check(args) -> None:
    """Raises before the model is loaded."""
    least = 0 if args.save_state else 1
    if args.max_tokens < least or args.prefill_chunk < 1:
        raise ValueError("--max-tokens and --prefill-chunk must be at least 1 (--max-tokens 0 with --save-state).")
    if not -(2**63) <= args.seed < 2**63:
        raise ValueError(f"--seed must fit into 64 bits: got {args.seed}.")
    if args.prompt and args.prompt_file:
        raise ValueError("--prompt and --prompt-file are both given; choose one.")
    if args.save_state and args.save_state.exists():
        raise FileExistsError(
            f"{args.save_state} exists, and nothing is overwritten. Choose another name for the state."
        )
    if args.save_state and not args.save_state.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {args.save_state.parent} for --save-state. Make it first.")
    if args.load_state and not args.load_state.is_file():
        raise FileNotFoundError(f"there is no state {args.load_state}. Write one with --save-state.")
    args.device = choose_device(args.device)


def prompts_of(args) -> list[str] | None:
    """None where the text of a saved state is to go on as it is. Raises: ValueError for text that is not UTF-8."""
    where = args.prompt_file or "--prompt"
    try:
        if args.prompt_file:
            prompts = [args.prompt_file.read_text(encoding="utf-8")]
        elif args.prompt or args.load_state:
            prompts = args.prompt
        else:
            where = "standard input"
            ask = "type the text to continue, then Ctrl-D" if sys.stdin.isatty() else "reading it from standard input"
            print(f"[no --prompt: {ask}]", file=sys.stderr)
            prompts = [sys.stdin.read().rstrip("\n")]
        for prompt in prompts or ():
            prompt.encode()  # what a shell hands over may be bytes in any encoding
    except UnicodeError:
        raise ValueError(f"{where} is not UTF-8. Convert the text first, as by iconv -f latin1 -t utf-8.") from None
    return prompts


def read_prompts(args, model, tokenizer, prompts: list[str] | None) -> SavedState:
    """The state after the prompts, read now or, as far as it goes, from disk."""
    # Training documents follow an end-of-text token, so that is what an empty context looks like to the model.
    start = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.bos_id
    if not args.load_state:
        ids = [([] if start is None else [start]) + tokenizer.encode(prompt) for prompt in prompts]
        logits, state = read(model, ids, chunk=args.prefill_chunk, room=args.max_tokens)
        return SavedState(state, logits, ids)
    saved = load_state(args.load_state, model)
    if prompts is None:
        return saved
    state, ids = saved.state, saved.tokens
    if len(ids) == 1 < len(prompts):  # one text, continued in several ways
        state, ids = state.select(torch.zeros(len(prompts), dtype=torch.int64)), ids * len(prompts)
    if len(ids) != len(prompts):
        raise ValueError(
            f"{args.load_state} holds {len(ids)} texts: give as many prompts, or none. Got {len(prompts)}."
        )
    more = [encode_after(tokenizer, prompt) for prompt in prompts]
    if not all(more):
        raise ValueError("an empty --prompt adds nothing to a saved state; leave it out.")
    logits, state = read(model, more, state, args.prefill_chunk)
    return SavedState(state, logits, [row + new for row, new in zip(ids, more, strict=True)])


def encode_after(tokenizer, text: str) -> list[int]:
    """Tokens of text that follows other text: without the space that sentencepiece puts before a first word."""
    for before in "\n", ".", "x":
        first, both = tokenizer.encode(before), tokenizer.encode(before + text)
        if both[: len(first)] == first:
            return both[len(first) :]
    return tokenizer.encode(text)


class Printer:
    """One text as it is written; several, each when it ends."""

    def __init__(self, tokenizer, ids: list[list[int]], given: list[str]) -> None:
        self.streams = [StreamDecoder(tokenizer, after=row) for row in ids]
        self.given, self.texts, self.unfinished = given, [""] * len(ids), set(range(len(ids)))
        self.show = visible if sys.stdout.isatty() else str  # a file or a pipe gets every byte
        self._emit(0, given[0] if len(ids) == 1 else "")

    def push(self, i: int, token: int) -> None:
        self._emit(i, self.streams[i].push(token))

    def close(self, i: int) -> None:
        self.unfinished.discard(i)
        self._emit(i, self.streams[i].flush())
        text = f"=== {i + 1}: {self.given[i]!r}\n{self.show(self.given[i] + self.texts[i])}\n"
        print("" if len(self.texts) == 1 else text, flush=True)

    def _emit(self, i: int, piece: str) -> None:
        if len(self.texts) == 1:
            print(self.show(piece), end="", flush=True)
        else:
            self.texts[i] += piece


def run(args) -> int:
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    prompts = prompts_of(args)
    dtype = DTYPES[args.dtype] if args.dtype else None
    model, tokenizer = load_pretrained(args.folder, device=args.device, dtype=dtype)
    began = time.perf_counter()
    state, logits, ids = read_prompts(args, model, tokenizer, prompts)
    if args.save_state:
        size, seconds = save_state(args.save_state, model, state, logits, ids), time.perf_counter() - began
        tokens = sum(map(len, ids))
        print(f"[wrote {args.save_state}: {tokens} tokens, {size / 1e6:.1f} MB, {seconds:.1f} s]", file=sys.stderr)
        if not args.max_tokens:
            return 0
    stop = None if args.no_stop or args.endless else tokenizer.eos_id
    steps = continuation(
        model,
        logits,
        state,
        max_tokens=None if args.endless else args.max_tokens,
        sampling=sampling,
        seed=args.seed,
        stop=stop,
        vocab_size=tokenizer.vocab_size,
        graph=False if args.no_graph else None,
        compiled=args.compile,
    )
    printer = Printer(tokenizer, ids, prompts or [""] * len(ids))
    status, written, began, first = 0, 0, time.perf_counter(), None
    try:
        for row in steps:
            first = first or time.perf_counter()  # after the step is compiled or captured
            for i, token in enumerate(row):
                written += token is not None
                if token is not None and token == stop:
                    printer.close(i)
                elif token is not None:
                    printer.push(i, token)
    except KeyboardInterrupt:
        status = 0 if args.endless else 130
    for i in sorted(printer.unfinished):
        printer.close(i)
    now = time.perf_counter()
    rate = (written - len(ids)) / (now - first) if written > len(ids) else 0
    print(f"[{written} tokens in {now - began:.1f} s, {rate:.1f} tokens/s after the first]", file=sys.stderr)
    return status


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    check(args)
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
