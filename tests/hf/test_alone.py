"""An exported model without this project's package, and tests/hf on transformers 4."""

import json
import os

import pytest
import torch

from ..scan.devices import in_process
from .common import EXPECTED, greedy, padded, random_texts

# Nothing of `absent` can be imported. No answer can be given to a question, and no socket be opened.
ALONE = """
import json, socket, sys
given = json.loads(sys.argv[1])
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
        model(**batch, labels=batch["input_ids"]).loss.item(),
    ]
loaded = [n for n, m in sys.modules.items() if m and n.partition(".")[0] in absent]
assert not loaded, loaded
json.dump(found, sys.stdout)
"""


def test_with_nothing_of_this_project(tmp_path, loaded, exported, tokenizer):
    """The exported model computes the native model's text, and the package's kernels' loss."""
    tokens = random_texts(1, 70)
    folders = {}
    for case in ("all", "hybrid, window", "gla"):
        folders[case] = str(exported(case)[1])
    found = in_process(
        "-c",
        ALONE,
        json.dumps({"folders": folders, "tokens": tokens.tolist()}),
        HF_HUB_OFFLINE="1",
        HF_MODULES_CACHE=str(tmp_path / "modules"),
    )
    rows = [tokenizer.encode(text) for text in ("import os", "def f(x):\n    return")]
    batch, mask = padded([torch.tensor([row]) for row in rows], "left", tokenizer.unk_id)
    for case, (ids, text, loss) in json.loads(found).items():
        native, model = loaded(case)
        assert ids == rows[0]
        assert text == greedy(native, tokens, 6).tolist(), case
        wanted = model(batch, attention_mask=mask, labels=batch).loss.item()
        assert loss == pytest.approx(wanted, abs=1e-4), case


VERSION_4 = "INTERDOMAIN_TRANSFORMERS4"
OF_PYTORCH = (
    "turn_by_turn",
    "every_bit",
    "compile",
    "offloaded_weights",
    "stays_float32",
)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get(VERSION_4), reason=f"{VERSION_4} names no folder with transformers 4"
)
def test_the_others_on_transformers_4():
    """The tests of this folder pass on transformers 4, with one case of each kind of state.

    Tests that are of PyTorch rather than transformers are left out. The folder:
    pip install --target DIR --no-deps transformers==4.57.6 'huggingface_hub==0.36.*' 'tokenizers==0.22.*'.
    """
    path = os.pathsep.join([os.environ[VERSION_4], os.environ["PYTHONPATH"]])
    left_out = " and ".join(f"not {name}" for name in (*OF_PYTORCH, "alone"))
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/hf", "-k", left_out]
    in_process("-m", "pytest", *options, **{"PYTHONPATH": path, EXPECTED: "4."})
