"""Exported models in vLLM's engine on a CPU: ./launch.sh test tests/vllm --vllm"""

import contextlib
import gc
import json
import os
import subprocess
import sys

import pytest
import torch

from ..common import TIMEOUT
from ..hf.common import CASES, TOKENS, greedy, random_texts

vllm = pytest.importorskip(
    "vllm", reason="vLLM is not installed: ./launch.sh test tests/vllm --vllm"
)
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

pytestmark = pytest.mark.e2e
# vLLM's softmax on a CPU has no narrower heads.
WIDE = {"dim": 128, "n_heads": 4, "head_dim": 32}
STEPS = 12
LENGTHS = (1, 2, 5, 40, 40, 50, 7, 7, 7, 33, 64, 3)
HYBRID = "hybrid, window"


def made(exported_model, case):
    condition, options = CASES[case]
    if condition == "softmax" or case.startswith("hybrid"):
        options = options | WIDE
    return exported_model(condition, **options)


@contextlib.contextmanager
def engine(folder, **options):
    """An engine in this process, with fewer states than requests. It reads prompts in pieces."""
    small = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "dtype": "float32",
        "seed": 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        llm = vllm.LLM(str(folder), **(small | options))
        yield llm
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def prompts(lengths=LENGTHS):
    return [random_texts(1, n, seed=i)[0].tolist() for i, n in enumerate(lengths)]


def outputs(llm, given, **options):
    greedy_options = {"temperature": 0, "max_tokens": STEPS, "ignore_eos": True}
    requests = [{"prompt_token_ids": prompt} for prompt in given]
    return llm.generate(requests, vllm.SamplingParams(**greedy_options | options), use_tqdm=False)


def texts(llm, given, **options):
    return [list(answer.outputs[0].token_ids) for answer in outputs(llm, given, **options)]


def wanted(model, given):
    """Returns each text by the native model, which reads the whole text for every token."""
    return [greedy(model, torch.tensor([p]), STEPS)[0, len(p) :].tolist() for p in given]


def fill_memory(llm, value):
    """Fills the memory of all layers' states."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    for mixer in runner.model.mixers:
        for page in getattr(mixer, "kv_cache", ()):
            if torch.is_tensor(page):
                page.fill_(value)


@pytest.mark.parametrize("case", CASES)
def test_greedy_texts(case, exported_model):
    """Texts are the native model's with prefix caching and without, and in memory that held NaN.

    Prefix caching is on by default. The second time, the whole blocks of a long prompt, of 16 to
    128 tokens, are snapshots of states.
    """
    model, folder = made(exported_model, case)
    given = prompts()
    text = wanted(model, given)
    for caching in (True, False):
        with engine(folder, enable_prefix_caching=caching) as llm:
            fill_memory(llm, torch.nan)
            assert texts(llm, given) == text
    given = prompts((300,))
    text = wanted(model, given)
    with engine(folder, max_model_len=512, max_num_batched_tokens=256) as llm:
        assert texts(llm, given) == text
        assert texts(llm, given) == text
        assert outputs(llm, given)[0].num_cached_tokens >= 256


@pytest.mark.parametrize("case", ["interdomain", HYBRID])
def test_requests_do_not_see_each_other(case, exported_model):
    """Requests are aborted at any step, and others get their memory."""
    model, folder = made(exported_model, case)
    given = prompts(LENGTHS * 2)
    options = vllm.SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    answers = {}
    steps = 0
    with engine(folder) as llm:
        core = llm.llm_engine
        for i, prompt in enumerate(given):
            core.add_request(str(i), {"prompt_token_ids": prompt}, options)
        while core.has_unfinished_requests():
            for out in core.step():
                if out.finished:
                    answers[out.request_id] = list(out.outputs[0].token_ids)
            steps += 1
            if steps % 3 == 0 and str(steps) not in answers and steps < len(given):
                core.abort_request([str(steps)])
    assert 12 < len(answers) < len(given)
    texts_of_all = wanted(model, given)
    for i, answer in answers.items():
        assert answer == texts_of_all[int(i)]


def test_preempted_requests_are_computed_again(exported_model):
    """More keys and values than there is room for."""
    model, folder = made(exported_model, HYBRID)
    given = prompts((60, 61, 62, 63))
    with engine(folder, num_gpu_blocks_override=8, enable_prefix_caching=False) as llm:
        assert texts(llm, given) == wanted(model, given)


def test_sampling(exported_model):
    """Rows of a padded vocabulary are no tokens."""
    _, folder = made(exported_model, "interdomain")
    with engine(folder) as llm:
        draws = texts(llm, prompts((20,)) * 8, temperature=1.0, top_p=0.9)
    assert any(text != draws[0] for text in draws)
    for text in draws:
        assert len(text) == STEPS
        assert max(text) < TOKENS


@pytest.mark.parametrize(
    ("case", "dtype", "near"),
    [
        ("interdomain", "float32", 1e-4),
        ("interdomain", "bfloat16", 0.2),
        ("s4d", "bfloat16", 0.2),
        (HYBRID, "bfloat16", 0.2),
        ("mamba2", "bfloat16", 0.2),
    ],
)
def test_log_probabilities(case, dtype, near, exported_model):
    """They are near those of the native model in float32.

    A text differs only if two tokens are as near to each other.
    """
    model, folder = made(exported_model, case)
    given = prompts()
    with engine(folder, dtype=dtype) as llm:
        answers = outputs(llm, given, logprobs=1)
    for prompt, answer in zip(given, answers, strict=True):
        text = answer.outputs[0]
        tokens = list(text.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]]))
        exact = logits[0, len(prompt) - 1 : -1, :TOKENS].log_softmax(-1)
        exact_of_text = exact[range(STEPS), tokens]
        found = [text.logprobs[i][token].logprob for i, token in enumerate(tokens)]
        assert found == pytest.approx(exact_of_text.tolist(), abs=near)
        assert (exact.amax(-1) - exact_of_text).max() < near


PROGRAM = """
import json, sys
import vllm
if __name__ == "__main__":
    folder, prompts, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    shared = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32, dtype="float32", seed=0)
    llm = vllm.LLM(folder, tensor_parallel_size=2, distributed_executor_backend="mp", **shared)
    options = vllm.SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], options, use_tqdm=False)
    print("texts", json.dumps([[*answer.outputs[0].token_ids] for answer in answers]))
"""


@pytest.mark.parametrize("case", ["interdomain", "s4d", HYBRID, "mamba2", "gated-deltanet"])
def test_two_ranks(case, exported_model, tmp_path):
    """Tensor parallelism over gloo."""
    model, folder = made(exported_model, case)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = [program, folder, json.dumps(prompts()), STEPS]
    command = [sys.executable, *map(str, arguments)]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("texts ")]
    assert json.loads(line.removeprefix("texts ")) == wanted(model, prompts())
