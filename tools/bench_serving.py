"""interdomain bench-serving exports/interdomain exports/softmax --output benchmarks/results/serving

Count what a server does with an exported folder, beside a softmax model of the same size.

Tokens per second, prompts included, for several numbers of requests at once: vLLM with each folder, and transformers'
`generate` with the first, as one batch. How many requests of a length fit in a GB, by vLLM's own count. And many readers of one
long document, whose state is computed once. It needs vLLM. Weights change no figure: folders of untrained models do.

    interdomain bench-serving exports/interdomain exports/softmax --prompt 1024 --answer 64

Documentation: docs/serving.md
"""

import contextlib
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from interdomain.files.pretrained import read_config
from interdomain.tools._bench import results
from interdomain.tools._cli import argument_parser, path_argument, user_errors

ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENGINE |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
REQUESTS = (1, 16, 64)
ROUNDS = 3  # of each; the fastest counts
LENGTHS = (4096, 32_768, 131_072)
SPEED = ["server", "model", "requests", "tokens/s", "seconds"]
MEMORY = ["model", "tokens", "requests per GB"]
READERS = ["model", "tokens", "readers", "first reader s", "all others s", "tokens from the cache"]


def parse(argv):
    p = argument_parser(__doc__, "FOLDER SOFTMAX --output DIR")
    p.add_argument("folder", type=path_argument, metavar="FOLDER", help="of `convert`")
    p.add_argument("softmax", type=path_argument, metavar="SOFTMAX", help="the same size, with softmax")
    p.add_argument("--prompt", type=int, default=128, metavar="TOKENS", help="of each prompt (128)")
    p.add_argument("--answer", type=int, default=128, metavar="TOKENS", help="of each answer (128)")
    p.add_argument("--document", type=int, default=100_000, metavar="TOKENS", help="of the document (100,000)")
    p.add_argument("--readers", type=int, default=1000, metavar="N", help="of the document (1,000); 0: none")
    results.add_arguments(p, "serving")
    return p.parse_args(argv)


@contextlib.contextmanager
def engine(folder: Path, length: int):
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    llm = LLM(str(folder), max_model_len=length, max_num_seqs=max(REQUESTS), dtype="float32", seed=0)
    yield llm
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def prompts(requests: int, tokens: int, seed: int) -> torch.Tensor:
    """[requests, tokens], each another text: no prefix is shared."""
    return torch.randint(3, 1000, (requests, tokens), generator=torch.Generator().manual_seed(1000 * requests + seed))


def served(folder: Path, args: Any, report: results.Report) -> None:
    """Rows of vLLM."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    options = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
    with engine(folder, args.prompt + args.answer) as llm:
        for requests in REQUESTS:
            times = []
            for seed in range(ROUNDS):
                asked = [{"prompt_token_ids": row.tolist()} for row in prompts(requests, args.prompt, seed)]
                begin = time.perf_counter()
                llm.generate(asked, options, use_tqdm=False)
                times.append(time.perf_counter() - begin)
            report.add("speed", row_of("vLLM", folder, requests, args, min(times)))


@torch.inference_mode()
def generated(folder: Path, args: Any, report: results.Report) -> None:
    """Rows of transformers."""
    from interdomain.hf import InterdomainForCausalLM

    model: Any = InterdomainForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options: Any = dict(max_new_tokens=args.answer, do_sample=False, eos_token_id=None, pad_token_id=0)
    for requests in REQUESTS:
        times = []
        for seed in range(ROUNDS):
            begin = time.perf_counter()
            model.generate(prompts(requests, args.prompt, seed), **options)
            times.append(time.perf_counter() - begin)
        report.add("speed", row_of("transformers, one batch", folder, requests, args, min(times)))


def row_of(server: str, folder: Path, requests: int, args: Any, seconds: float) -> dict[str, Any]:
    tokens = requests * (args.prompt + args.answer)
    names = dict(server=server, model=folder.name, requests=requests)
    return names | {"tokens/s": round(tokens / seconds, 1), "seconds": round(seconds, 2)}


def fitting(folder: Path, length: int) -> dict[str, Any]:
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config as fit  # pyright: ignore[reportMissingImports]

    with engine(folder, length) as llm:
        core = llm.llm_engine.engine_core.engine_core
        requests = fit(core.vllm_config, core.scheduler.kv_cache_config)
    return {"model": folder.name, "tokens": length, "requests per GB": round(requests * 1e9 / 2**30, 1)}


def read(folder: Path, tokens: int, readers: int) -> dict[str, Any]:
    """One request reads a document, then many ask it a question of eight tokens each."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    options = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    document = prompts(1, tokens, 0)[0].tolist()
    asked = [{"prompt_token_ids": document + question.tolist()} for question in prompts(readers, 8, 1)]
    with engine(folder, tokens + 32) as llm:
        seconds, answers = [], []
        for part in (asked[:1], asked[1:]):
            begin = time.perf_counter()
            answers += llm.generate(part, options, use_tqdm=False)
            seconds.append(round(time.perf_counter() - begin, 2))
    cached = sum(answer.num_cached_tokens for answer in answers)
    return dict(zip(READERS, (folder.name, tokens, readers, *seconds, cached), strict=True))


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    os.environ |= ENGINE
    for folder in (args.folder, args.softmax):
        read_config(folder)
    device = results.choose_device(args.device)
    options = dict(prompt=args.prompt, answer=args.answer, requests=REQUESTS)
    report = results.Report(args.name, args.output, device, options, named=True)
    report.table("speed", SPEED)
    report.table("memory", MEMORY)
    report.table("readers", READERS)
    for folder in (args.folder, args.softmax):
        served(folder, args, report)
    generated(args.folder, args, report)
    for folder in (args.folder, args.softmax):
        for length in LENGTHS:
            report.add("memory", fitting(folder, length))
    if args.readers:
        report.add("readers", read(args.folder, args.document, args.readers))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
