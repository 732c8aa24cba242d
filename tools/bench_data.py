"""python -m interdomain.tools.bench_data --megabytes 48

Times prepare_data by number of processes, beside the tokenizer library's own rate over the same text in one thread, and the
reading of training samples. Tokens per second of wall clock tell how long it takes; tokens per second of processor time tell
what it costs, and stay true on a machine that others use too.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from interdomain.data import PackedDataset, TokenCorpus, load_tokenizer
from interdomain.data.readers import read_documents

from ._cli import argument_parser, user_errors
from .train_tokenizer import train_sentencepiece

SEQ_LEN = 4096


def prepare(source: Path, tokenizer: Path, output: Path, processes: int) -> tuple[float, float]:
    """(seconds, seconds of processor time) of a whole command, all its processes together."""
    command = [sys.executable, "-m", "interdomain.tools.prepare_data", "--input", source, "--output", output]
    command += ["--tokenizer", tokenizer, "--workers", processes, "--validation-fraction", 0]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--input", nargs="+", default=["stdlib"], help="text, as of prepare_data (default: stdlib)")
    parser.add_argument("--megabytes", type=float, default=48, help="of text, repeated as needed (default %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=8192, help="of the tokenizer (default %(default)s)")
    return parser.parse_args(argv)


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    texts, size = [], 0
    for document in itertools.cycle(list(read_documents(args.input, max_bytes=int(args.megabytes * 1e6)))):
        texts.append(document.text)
        size += document.source_bytes
        if size >= args.megabytes * 1e6:
            break
    if not texts:
        raise ValueError(f"There is no text in the input within --megabytes {args.megabytes:g}.")
    with tempfile.TemporaryDirectory() as folder:
        source, path, output = (Path(folder, name) for name in ("rows.jsonl", "tokenizer.model", "none"))
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        path.write_bytes(train_sentencepiece(read_documents(args.input, max_bytes=8_000_000), args.vocab_size))
        tokenizer = load_tokenizer(path)
        print(f"{'':<28}{'processes':>10}{'tokens/s':>14}{'tokens per CPU s':>18}")
        started, cpu = time.perf_counter(), time.process_time()
        tokens = sum(len(tokenizer.encode(text, add_eos=True)) for text in texts)
        rows = [("the library alone", 1, time.perf_counter() - started, time.process_time() - cpu)]
        for processes in sorted({1, len(os.sched_getaffinity(0))}):
            output = Path(folder, str(processes))
            rows.append(("prepare_data, jsonl", processes, *prepare(source, path, output, processes)))
        for name, processes, seconds, cpu in rows:
            print(f"{name:<28}{processes:>10}{tokens / seconds:>14,.0f}{tokens / cpu:>18,.0f}")
        dataset = PackedDataset(TokenCorpus(output), SEQ_LEN, seed=0)
        started = time.perf_counter()
        for samples in itertools.count(8, 8):
            dataset.read_batch(np.arange(samples - 8, samples))
            if time.perf_counter() - started > 1:
                break
        rate = samples * SEQ_LEN / (time.perf_counter() - started)
    print(f"{rate:,.0f} tokens/s read by one thread, shuffled samples of {SEQ_LEN} tokens in the page cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
