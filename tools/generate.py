"""python -m interdomain.tools.generate exports/debug --prompt "def main(" --max-tokens 200

Continue text with a standalone folder, through the recurrent state. Needs torch, safetensors and sentencepiece; no TorchTitan.
One prompt streams as it is written; several are decoded together and printed as each of them ends.
"""

import argparse
import sys
import time

import torch

from interdomain.data import StreamDecoder
from interdomain.model.generation import PREFILL_CHUNK, Sampling, generate
from interdomain.model.pretrained import DTYPES, load_pretrained

from ._cli import user_errors


def parse(argv):
    p = argparse.ArgumentParser(prog="python -m interdomain.tools.generate", description=__doc__.split("\n\n")[1])
    p.add_argument("folder", help="standalone folder (made by interdomain.tools.convert)")
    p.add_argument(
        "--prompt", action="append", help="text to continue; repeat for several. Default: read standard input"
    )
    p.add_argument("--max-tokens", type=int, default=128, help="tokens to write per prompt (default 128)")
    p.add_argument("--temperature", type=float, default=0.8, help="0 for greedy (default 0.8)")
    p.add_argument("--top-k", type=int, default=0, help="keep the k most probable tokens; 0 keeps all")
    p.add_argument(
        "--top-p", type=float, default=0.95, help="keep the most probable tokens up to this mass (default 0.95)"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--no-stop", action="store_true", help="write on after the end-of-text token")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=DTYPES, help="default: as stored; the dynamics stay float32")
    p.add_argument("--prefill-chunk", type=int, default=PREFILL_CHUNK, help="tokens of a prompt per pass")
    return p.parse_args(argv)


def check_device(device: str) -> None:
    """Raises ValueError unless torch can hold a tensor there."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:  # a build without CUDA asserts
        raise ValueError(
            f"--device {device} cannot be used here ({str(e).splitlines()[0]}). Choose --device cpu, or cuda where "
            "torch.cuda.is_available() is true."
        ) from e


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    if args.max_tokens < 1 or args.prefill_chunk < 1:
        raise ValueError("--max-tokens and --prefill-chunk must be at least 1.")
    if not -(2**63) <= args.seed < 2**63:
        raise ValueError(f"--seed must fit into 64 bits: got {args.seed}.")
    check_device(args.device)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    prompts = args.prompt or [sys.stdin.read().rstrip("\n")]
    model, tokenizer = load_pretrained(
        args.folder, device=args.device, dtype=DTYPES[args.dtype] if args.dtype else None
    )
    # Training documents follow an end-of-text token, so that is what an empty context looks like to the model.
    start = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.bos_id
    ids = [([] if start is None else [start]) + tokenizer.encode(prompt) for prompt in prompts]
    streams = [StreamDecoder(tokenizer, after=row) for row in ids]
    single = len(prompts) == 1
    texts = [""] * len(prompts)
    written, began = 0, time.perf_counter()

    def emit(i: int, piece: str) -> None:
        texts[i] += piece
        if single:
            print(piece, end="", flush=True)

    def close(i: int) -> None:
        emit(i, streams[i].flush())
        if not single:
            print(f"=== {i + 1}: {prompts[i]!r}\n{prompts[i]}{texts[i]}\n", flush=True)

    if single:
        print(prompts[0], end="", flush=True)
    stop = None if args.no_stop else tokenizer.eos_id
    open_rows = set(range(len(prompts)))
    for row in generate(
        model,
        ids,
        max_tokens=args.max_tokens,
        sampling=sampling,
        seed=args.seed,
        stop=stop,
        prefill_chunk=args.prefill_chunk,
        vocab_size=tokenizer.vocab_size,
    ):
        for i, token in enumerate(row):
            if token is None:
                continue
            written += 1
            if token != stop:
                emit(i, streams[i].push(token))
            else:
                close(i)
                open_rows.discard(i)
    for i in sorted(open_rows):
        close(i)
    if single:
        print()
    seconds = time.perf_counter() - began
    print(f"[{written} tokens in {seconds:.1f} s, {written / seconds:.1f} tokens/s]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
