"""A folder on a machine that has torch and transformers and nothing of this project; and tests/hf on transformers 4."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ..common import REPOSITORY
from .common import CASES, EXPECTED, KINDS, ON, greedy, padded, random_texts

# Nothing of `absent` can be imported. No answer can be given to a question, and no socket be opened.
ALONE = """
import json, socket, sys
given = json.load(sys.stdin)
absent = "interdomain torchtitan torchdata triton sentencepiece tensorboard datasets kernels".split()
for name in absent:
    sys.modules[name] = None
class NoNetwork(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket was opened")
socket.socket = NoNetwork
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
found = {}
for case, folder in given["folders"].items():
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert "transformers_modules" not in sys.modules or found
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens = torch.tensor(given["tokens"])
    batch = tokenizer(["import os", "def f(x):\\n    return"], padding=True, return_tensors="pt")
    found[case] = [
        tokenizer("import os").input_ids,
        model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None).tolist(),
        model.generate(**batch, max_new_tokens=4, do_sample=False, eos_token_id=None).tolist(),
        model(**batch, labels=batch["input_ids"]).loss.item(),
    ]
loaded = [n for n, m in sys.modules.items() if m and n.partition(".")[0] in absent]
assert not loaded, loaded
json.dump(found, sys.stdout)
"""


def test_with_nothing_of_this_project(tmp_path, loaded, exported, tokenizer):
    """The folder computes the native model's numbers, and those of the folder here with the package's kernels."""
    cases, tokens = ("interdomain", "all", "s4d", "softmax", "gla"), random_texts(1, 70)
    given = {"folders": {case: str(exported(case)[1]) for case in cases}, "tokens": tokens.tolist()}
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        input=json.dumps(given),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    rows = [tokenizer.encode(text) for text in ("import os", "def f(x):\n    return")]
    batch, mask = padded([torch.tensor([row]) for row in rows], "left", tokenizer.unk_id)
    for case, (ids, text, batch_text, loss) in json.loads(done.stdout).items():
        native, model = loaded(case)
        assert ids == rows[0]
        assert torch.equal(torch.tensor(text), greedy(native, tokens, 6)), case
        assert (
            batch_text
            == model.generate(batch, attention_mask=mask, max_new_tokens=4, **ON).tolist()
        )
        assert abs(loss - model(batch, attention_mask=mask, labels=batch).loss.item()) < 1e-4


VERSION_4 = "INTERDOMAIN_TRANSFORMERS4"


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get(VERSION_4), reason=f"{VERSION_4} names no folder with transformers 4"
)
def test_the_others_on_transformers_4():
    """With one condition of each kind of state, for transformers calls all in the same way; without tests of PyTorch.

    The folder: pip install --target DIR --no-deps transformers==4.57.6 'huggingface_hub==0.36.*' 'tokenizers==0.22.*'.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", VERSION_4))
    }
    env |= {
        "PYTHONPATH": f"{os.environ[VERSION_4]}{os.pathsep}{env['PYTHONPATH']}",
        "OMP_NUM_THREADS": "1",
    }
    env |= {EXPECTED: "4."}
    others = [case for case in CASES if case not in KINDS]
    of_torch = (
        "gradients_and_steps",
        "turns_of_unequal",
        "every_bit",
        "compile",
        "nothing_of_this_project",
    )
    without = " and ".join(f"not {name}" for name in (*others, *of_torch))
    pytest_here = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "tests/hf",
    ]
    done = subprocess.run(
        [*pytest_here, "-k", without], cwd=REPOSITORY, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
