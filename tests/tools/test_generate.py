"""Text from a standalone folder: what is printed is what the model says, alone on a machine that has torch and little else."""

import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from interdomain.model.generation import Sampling
from interdomain.model.generation import generate as generate_tokens
from interdomain.model.pretrained import checksums, load_pretrained
from interdomain.tools import convert, generate

from ..common import REPOSITORY
from .checkpoints import small_model, write_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory, tokenizer):
    """A folder made by convert."""
    path = tmp_path_factory.mktemp("generate")
    checkpoint = write_checkpoint(path / "run", small_model(), tokenizer)
    assert convert.main([str(checkpoint), "--output", str(path / "folder")]) == 0
    return path / "folder"


@pytest.fixture
def folder(tmp_path, source):
    return shutil.copytree(source, tmp_path / "folder")


def run(folder, *options, expect=0):
    assert generate.main([str(folder), *map(str, options)]) == expect


def rewrite(folder, tensors):
    """Other weights, on purpose: with their checksum."""
    save_file(tensors, folder / "model.safetensors")
    record = json.loads((folder / "config.json").read_text())
    record["weights"] = checksums([folder / "model.safetensors"])
    (folder / "config.json").write_text(json.dumps(record))


def continuation(folder, prompt, max_tokens, sampling=None, seed=0):
    """(token ids of the prompt as the tool feeds it, ids that follow)."""
    model, tokenizer = load_pretrained(folder)
    ids = [tokenizer.eos_id, *tokenizer.encode(prompt)]
    options = dict(sampling=sampling or Sampling(temperature=0), seed=seed, vocab_size=tokenizer.vocab_size)
    steps = generate_tokens(model, [ids], max_tokens=max_tokens, **options)
    return ids, [step[0] for step in steps]


PROMPTS = ["def f(x):\n    ", "import os", "", "  é 漢字 <s>"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_text_is_the_decoded_tokens(source, capsys, tokenizer, prompt):
    run(source, "--prompt", prompt, "--max-tokens", 40, "--temperature", 0)
    out, err = capsys.readouterr()
    ids, new = continuation(source, prompt, 40)
    assert out == tokenizer.decode(ids + new) + "\n"
    assert out.startswith(prompt)
    assert re.fullmatch(r"\[40 tokens in \d+\.\d s, \d+\.\d tokens/s after the first\]\n", err)


def test_several_prompts_are_each_alone(source, capsys):
    alone = []
    for prompt in PROMPTS:
        run(source, "--prompt", prompt, "--max-tokens", 25, "--temperature", 0)
        alone.append(capsys.readouterr().out.removesuffix("\n"))
    run(source, *(o for p in PROMPTS for o in ("--prompt", p)), "--max-tokens", 25, "--temperature", 0)
    out, err = capsys.readouterr()
    blocks = {f"=== {i + 1}: {p!r}\n{text}\n\n" for i, (p, text) in enumerate(zip(PROMPTS, alone, strict=True))}
    for block in blocks:
        assert block in out
    assert len(out) == sum(map(len, blocks))
    assert err.startswith("[100 tokens in ")


def test_a_terminal_is_given_nothing_to_obey(source, capsys, monkeypatch):
    prompts = ("--prompt", "\x1b[2Jé\u3000👩\u200d👧\x9b\n", "--prompt", "\a")
    run(source, *prompts, "--max-tokens", 1)
    assert "\x1b[2Jé\u3000👩\u200d👧\x9b\n" in capsys.readouterr().out  # of a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for given in (prompts, prompts[:2]):
        run(source, *given, "--max-tokens", 1)
        out = capsys.readouterr().out
        assert "\\x1b[2Jé\u3000👩\u200d👧\\x9b\n" in out
        assert not {*"\x1b\x9b\a"} & {*out}


def test_sampling_options_and_seed(source, capsys, tokenizer):
    options = ("--prompt", "x", "--max-tokens", 30, "--temperature", 1.5, "--top-k", 50, "--top-p", 0.9, "--no-stop")
    run(source, *options, "--seed", 3, "--prefill-chunk", 1)
    first = capsys.readouterr().out
    ids, new = continuation(source, "x", 30, Sampling(1.5, 50, 0.9), seed=3)
    assert first == tokenizer.decode(ids + new) + "\n"
    run(source, *options, "--seed", 4)
    assert capsys.readouterr().out != first


def test_it_stops_at_the_end_of_text(folder, capsys, tokenizer):
    """A model whose next token is a function of the last one: a word after any, and the end of text after the word."""
    # The word starts with a space, which only the first word of a text may lose.
    words = {i: tokenizer.decode([3, i])[1:] for i in range(3, tokenizer.vocab_size)}  # 3: a byte, so nothing is first
    a, word = next((i, word) for i, word in words.items() if word[:1] == " " < word)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("wo.weight", "w2.weight")) or name in ("model.tok_embeddings.weight", "output.weight"):
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1)
    tensors["model.tok_embeddings.weight"][:, 0] = 1
    tensors["model.tok_embeddings.weight"][a] = torch.eye(32)[1]
    tensors["output.weight"][a, 0] = tensors["output.weight"][tokenizer.eos_id, 1] = 1
    rewrite(folder, tensors)
    options = ("--prompt", "x", "--max-tokens", 7, "--temperature", 0)
    run(folder, *options)
    out, err = capsys.readouterr()
    assert out == f"x{word}\n"  # the end itself is not printed
    assert err.startswith("[2 tokens in ")
    run(folder, *options, "--no-stop")
    out, err = capsys.readouterr()
    assert out == f"x{4 * word}\n"
    assert err.startswith("[7 tokens in ")


def test_a_prompt_that_is_not_utf8_is_one_paragraph(source, tmp_path, capsys, monkeypatch):
    """From a file, from a shell, and from a pipe as Python reads it in two locales. A pipe is a prompt, too."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    run(source, "--max-tokens", 5, "--temperature", 0)
    assert capsys.readouterr().out.startswith("import os")
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin1"))
    run(source, "--prompt-file", tmp_path / "latin1.txt", expect=2)
    assert "latin1.txt is not UTF-8" in error(capsys)
    run(source, "--prompt", os.fsdecode(b"\xe9"), expect=2)
    assert "--prompt is not UTF-8" in error(capsys)
    for errors in ("strict", "surrogateescape"):
        piped = io.TextIOWrapper(io.BytesIO(b"\xe9"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", piped)
        run(source, expect=2)
        assert "standard input is not UTF-8" in capsys.readouterr().err


class Enough(io.StringIO):
    """A reader who presses Ctrl-C, once."""

    pressed = False

    def write(self, text):
        if len(self.getvalue()) > 300 and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return super().write(text)


def test_without_end(source, monkeypatch, capsys):
    options = ("--prompt", "x", "--temperature", 0)
    run(source, *options, "--max-tokens", 400, "--no-stop")
    long = capsys.readouterr().out
    for more, status in ((["--endless", "--max-tokens", 3], 0), (["--max-tokens", 400, "--no-stop"], 130)):
        screen = Enough()
        monkeypatch.setattr(sys, "stdout", screen)
        run(source, *options, *more, expect=status)
        assert len(screen.getvalue()) > 300
        assert long.startswith(screen.getvalue().removesuffix("\n"))


LONG = "def f(x):\n    return x + 1\n\n" * 30


@pytest.mark.parametrize("more", [None, "\n\ndef g"])
def test_a_prompt_is_read_once(source, tmp_path, capsys, tokenizer, more):
    """Saved, loaded in another start and continued: the text of one start, whatever way the prompt came in."""
    state = tmp_path / "prompt.state"
    (tmp_path / "prompt.txt").write_text(LONG)
    saving = ("--save-state", state, "--max-tokens", 0, "--prefill-chunk", 50)
    run(source, "--prompt-file", tmp_path / "prompt.txt", *saving)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"[wrote {state}: " in err
    options = ("--max-tokens", 20, "--temperature", 0)
    run(source, "--load-state", state, *options, *([] if more is None else ["--prompt", more]))
    found = capsys.readouterr().out
    run(source, "--prompt", LONG + (more or ""), *options)
    assert LONG + found == capsys.readouterr().out
    before = state.read_bytes()
    run(source, "--prompt", "x", "--save-state", state, expect=2)
    assert "exists, and nothing is overwritten" in error(capsys)
    assert state.read_bytes() == before


def test_one_prompt_in_several_ways(source, tmp_path, capsys):
    run(source, "--prompt", LONG, "--save-state", tmp_path / "state", "--max-tokens", 1)
    capsys.readouterr()
    options = ("--load-state", tmp_path / "state", "--max-tokens", 9, "--temperature", 0)
    alone = []
    for prompt in ("import", "class A"):
        run(source, *options, "--prompt", prompt)
        alone.append(capsys.readouterr().out.removesuffix("\n"))
    run(source, *options, "--prompt", "import", "--prompt", "class A")
    out = capsys.readouterr().out
    for prompt, text in zip(("import", "class A"), alone, strict=True):
        assert f"{prompt!r}\n{text}\n" in out


ALONE = """
import sys
for name in ("torchtitan", "torchdata", "triton", "transformers", "datasets", "tensorboard"):
    sys.modules[name] = None  # as if it were not installed: import fails, find_spec finds nothing
import socket
class NoNetwork(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket was opened")
socket.socket = NoNetwork
for name in ("torchtitan", "triton", "transformers"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{name} was not blocked")
from interdomain.tools.generate import main
code = main(sys.argv[1:])
loaded = [n for n, m in sys.modules.items() if m and n.partition(".")[0] in ("torchtitan", "triton", "transformers")]
sys.exit(code or (f"loaded {loaded}" if loaded else 0))
"""


def test_it_needs_torch_safetensors_and_sentencepiece_alone(source, tmp_path, tokenizer):
    options = ["--prompt", "import os", "--max-tokens", "8", "--temperature", "0"]
    argv, env = [sys.executable, "-c", ALONE, str(source), *options], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    ids, new = continuation(source, "import os", 8)
    assert done.stdout == tokenizer.decode(ids + new) + "\n"


def error(capsys):
    """The one paragraph on stderr, and nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().split("\n")) == 1, err
    assert err.startswith("error: ")
    return err


def test_what_cannot_be_is_one_paragraph(folder, tmp_path, capsys):
    """tests/model/test_pretrained.py has all that can be wrong with a folder."""
    for options, words in (
        (["--max-tokens", 0], ["--max-tokens", "at least 1"]),
        (["--prefill-chunk", 0], ["--prefill-chunk", "at least 1"]),
        (["--temperature", -1], ["temperature", "-1"]),
        (["--seed", 2**64], ["--seed", "64 bits"]),
        (["--load-state", "nowhere.state"], ["no state nowhere.state", "--save-state"]),
        (["--save-state", "nowhere/x.state"], ["no folder nowhere", "--save-state"]),
        (["--prompt-file", "x.txt"], ["--prompt", "--prompt-file", "choose one"]),
    ):
        run(folder, "--prompt", "x", *options, expect=2)
        message = error(capsys)
        assert all(word in message for word in words), message
    os.truncate(folder / "model.safetensors", 9999)
    for damaged, words in ((folder, "model.safetensors is truncated"), (tmp_path, "is not a model folder")):
        run(damaged, "--prompt", "x", expect=2)
        assert words in error(capsys)


def test_a_reader_that_leaves_ends_it_quietly(source):
    """`generate ... | head`: not a word, and the status of a program that SIGPIPE ended, as with cat."""
    argv = (
        f"{sys.executable} -m interdomain.tools.generate {source} --prompt x --endless | head -c 20; exit $PIPESTATUS"
    )
    done = subprocess.run(
        ["bash", "-c", argv], cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.stdout.startswith("x")
    assert done.stderr == ""
    assert done.returncode == 141
