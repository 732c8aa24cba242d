"""A folder on a machine that has torch and transformers and nothing of this project; and tests/hf on transformers 4."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ..common import REPOSITORY
from .common import CASES, EXPECTED, KINDS, greedy, random_texts

# As if these were not installed: import fails, find_spec finds nothing. The environment is editable: its finder goes too.
ALONE = """
import importlib, json, sys
absent = ("interdomain", "torchtitan", "torchdata", "triton", "sentencepiece", "tensorboard", "datasets", "kernels")
for name in absent:
    sys.modules[name] = None
import socket
class NoNetwork(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket was opened")
socket.socket = NoNetwork
for name in absent:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    sys.exit(f"{name} was not blocked")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
given = json.load(sys.stdin)
found = {}
for case, folder in given["folders"].items():
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens = torch.tensor(given["tokens"])
    assert tokenizer.padding_side == "left"
    batch = tokenizer(["import os", "def f(x):\\n    return"], padding=True, return_tensors="pt")
    model.generate(**batch, max_new_tokens=2)
    found[case] = model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None).tolist()
    found["encoded"] = tokenizer("import os").input_ids
loaded = [n for n, m in sys.modules.items() if m and n.partition(".")[0] in absent]
assert not loaded, loaded
json.dump(found, sys.stdout)
"""


def test_with_nothing_of_this_project(tmp_path, exported, tokenizer):
    cases = ("interdomain", "all", "s4d", "softmax")
    tokens = random_texts(1, 12)
    given = {"folders": {case: str(exported(case)[1]) for case in cases}, "tokens": tokens.tolist()}
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        input=json.dumps(given),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("encoded") == tokenizer.encode("import os")
    for case, text in found.items():
        assert torch.equal(torch.tensor(text), greedy(exported(case)[0], tokens, 6)), case


VERSION_4 = "INTERDOMAIN_TRANSFORMERS4"


@pytest.mark.skipif(not os.environ.get(VERSION_4), reason=f"{VERSION_4} names no folder with transformers 4")
def test_the_others_on_transformers_4():
    """With one condition of each kind of state: the others differ in the model alone, and run on transformers 5.

    The folder: pip install --target DIR --no-deps transformers==4.57.6 'huggingface_hub==0.36.*' 'tokenizers==0.22.*'.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", VERSION_4))}
    env |= {"PYTHONPATH": f"{os.environ[VERSION_4]}{os.pathsep}{env['PYTHONPATH']}", "OMP_NUM_THREADS": "1"}
    env |= {EXPECTED: "4."}
    others = " and ".join(f"not {case}" for case in CASES if case not in KINDS)
    others += " and (interdomain or not what_has_changed)"
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/hf"]
    done = subprocess.run([*pytest_here, "-k", others], cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
