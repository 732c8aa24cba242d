"""python -m interdomain.tools.bench_data --megabytes 48

Times prepare_data by number of processes and kind of file, beside the tokenizer library's own rate over the same text in
one thread; and the training loader, which reads what was prepared. Wall clock tells how long it takes, tokens per second
of processor time tell what it costs, and stay true on a machine that others use too. Figures depend on the text and the
tokenizer: give yours by --input and --tokenizer.
"""

import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from interdomain.data import PackedDataset, TokenCorpus, load_tokenizer
from interdomain.data.documents import list_files, read_documents
from interdomain.data.pieces import check_files

from . import _bench
from ._cli import argument_parser, user_errors
from .train_tokenizer import train_sentencepiece

FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")
BATCH = 64  # documents that the library gets at once, as prepare_data's workers give it


def parse(argv):
    p = argument_parser(__doc__)
    p.add_argument("--input", nargs="+", default=["stdlib"], help="text, as of prepare_data (default: stdlib)")
    p.add_argument("--tokenizer", help="as of prepare_data; default: sentencepiece, trained on the text")
    p.add_argument("--vocab-size", type=int, default=8192, help="of the trained one (default %(default)s)")
    p.add_argument("--megabytes", type=float, default=48, help="of text, repeated as often as needed (default 48)")
    p.add_argument("--workers", type=int, nargs="+", help="default: 1, 2, 4, ... up to the machine's cores")
    p.add_argument("--formats", nargs="+", help=f"of the input, default all: {', '.join(FORMATS)}")
    p.add_argument("--seq-len", type=int, default=4096, help="of the loader's samples (default %(default)s)")
    p.add_argument("--output", type=Path, help="folder of the results (default: benchmarks/results/<date>-cpu)")
    args = p.parse_args(argv)
    args.formats = _bench.choose("--formats", args.formats, FORMATS)
    cores = len(os.sched_getaffinity(0))
    args.workers = args.workers or [n for n in (2**i for i in range(10)) if n < cores] + [cores]
    for name in ("megabytes", "vocab_size", "seq_len"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive: got {getattr(args, name)}.")
    if min(args.workers) < 1:
        raise ValueError(f"--workers must be at least 1: got {min(args.workers)}.")
    return args


def texts_of(args) -> list[str]:
    """Documents of about `megabytes`, from the start again when the input is through."""
    check_files(list_files(args.input), "text")
    texts = [d.text for d in read_documents(args.input, max_bytes=int(args.megabytes * 1e6))]
    if not texts:
        raise ValueError(f"The input {', '.join(args.input)} holds no text within --megabytes {args.megabytes:g}.")
    taken, size = [], 0
    for text in itertools.cycle(texts):
        if size >= args.megabytes * 1e6:
            return taken
        taken.append(text)
        size += len(text.encode())


def write(texts: list[str], path: Path) -> None:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        # A thousand rows in a group, as FineWeb-Edu's files have them.
        pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
        return
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    if path.suffix == ".gz":
        data = gzip.compress(data, 6)
    elif path.suffix == ".zst":
        import zstandard

        data = zstandard.compress(data)
    path.write_bytes(data)


def library(tokenizer, texts: list[str]) -> tuple[int, float, float]:
    """(tokens, seconds, seconds of processor time) of the library's own call, one thread, nothing else."""
    started, cpu = time.perf_counter(), time.process_time()
    tokens = 0
    for i in range(0, len(texts), BATCH):
        tokens += sum(map(len, tokenizer.encode_batch(texts[i : i + BATCH], num_threads=1)))
    return tokens, time.perf_counter() - started, time.process_time() - cpu


def prepare(source: Path, tokenizer: Path, output: Path, processes: int) -> tuple[float, float, int]:
    """(seconds, seconds of processor time, peak resident bytes) of a whole command, all its processes together."""
    command = [sys.executable, "-m", "interdomain.tools.prepare_data", "--input", source, "--output", output]
    command += ["--tokenizer", tokenizer, "--workers", processes, "--validation-fraction", 0]
    started = time.perf_counter()
    with open(output.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
        peak, ended = 0, 0
        while not ended:
            time.sleep(0.02)
            peak = max(peak, resident(process.pid))
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"prepare_data failed: {output.with_suffix('.log').read_text()[-500:]}")
    return seconds, usage.ru_utime + usage.ru_stime, peak


def resident(pid: int) -> int:
    """Bytes in memory of a process and its children; 0 of those that have ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(resident, map(int, children)))


def loader(corpus: Path, seq_len: int) -> tuple[float, int]:
    """(tokens per second of one thread that reads shuffled samples, samples read)."""
    dataset = PackedDataset(TokenCorpus(corpus), seq_len, seed=0)
    samples, started = 0, time.perf_counter()
    while time.perf_counter() - started < 1:
        dataset.read_batch(np.arange(samples, samples + 8))
        samples += 8
    return samples * seq_len / (time.perf_counter() - started), samples


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    texts = texts_of(args)
    size = sum(len(text.encode()) for text in texts)
    options = {"megabytes": size / 1e6, "documents": len(texts), "formats": args.formats, "seq_len": args.seq_len}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if args.tokenizer is None:
            _bench.say("training a tokenizer")
            path = folder / "tokenizer.model"
            path.write_bytes(train_sentencepiece(read_documents(args.input, max_bytes=8_000_000), args.vocab_size))
        else:
            path = load_tokenizer(args.tokenizer).write(folder)
        tokenizer = load_tokenizer(path)
        options |= {"tokenizer": type(tokenizer).__name__, "vocab_size": tokenizer.vocab_size}
        report = _bench.Report("data", args.output, torch.device("cpu"), options)
        columns = ["what", "processes", "tokens/s", "MB/s", "tokens per CPU s", "of the library's", "peak MB"]
        report.table("text to tokens", columns)
        tokens, seconds, cpu = min((library(tokenizer, texts) for _ in range(2)), key=lambda run: run[2])
        own = tokens / cpu
        row = {"what": "the library alone", "processes": 1, "tokens/s": tokens / seconds, "MB/s": size / seconds / 1e6}
        report.add("text to tokens", {**row, "tokens per CPU s": own, "of the library's": 1.0})
        for kind in args.formats:
            source = folder / f"rows.{kind}"
            write(texts, source)
            for processes in args.workers:
                output = folder / f"{kind}-{processes}"
                seconds, cpu, peak = prepare(source, path, output, processes)
                row = {"what": f"prepare_data, {kind}", "processes": processes, "tokens/s": tokens / seconds}
                row |= {"MB/s": size / seconds / 1e6, "tokens per CPU s": tokens / cpu}
                report.add("text to tokens", row | {"of the library's": tokens / cpu / own, "peak MB": peak / 1e6})
            source.unlink()
        report.note(
            "prepare_data is timed as a whole command: start of all processes, reading, encoding, hashing, writing and the "
            "check of what was written. Peak memory is that of all its processes together."
        )
        report.table("prepared tokens to training", ["what", "tokens/s", "samples"])
        rate, samples = loader(output, args.seq_len)
        what = f"one thread, shuffled samples of {args.seq_len} tokens, in the page cache"
        report.add("prepared tokens to training", {"what": what, "tokens/s": rate, "samples": samples})
        report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
