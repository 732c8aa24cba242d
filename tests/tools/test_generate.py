"""Text from a standalone folder: what is printed is what the model says, alone on a machine that has torch and little else."""

import io
import os
import re
import shutil
import subprocess
import sys

import pytest

from interdomain.checkpoint.pretrained import load_pretrained
from interdomain.model.generation import Sampling
from interdomain.model.generation import generate as generate_tokens
from interdomain.tools import generate

from .checkpoints import edit_run


@pytest.fixture
def source(exported_model):
    return exported_model("interdomain")[1]


def run(folder, *options, expect=0):
    assert generate.main([str(folder), *map(str, options)]) == expect


def continuation(folder, prompt, max_tokens, sampling=None, seed=0, start=None):
    """(token ids of the prompt as the tool feeds it, ids that follow)."""
    model, tokenizer = load_pretrained(folder)
    start = [tokenizer.eos_id] if start is None else start
    ids = [*start, *tokenizer.encode(prompt)]
    options = dict(
        sampling=sampling or Sampling(temperature=0), seed=seed, vocab_size=tokenizer.vocab_size
    )
    steps = generate_tokens(model, [ids], max_tokens=max_tokens, **options)
    return ids, [step[0] for step in steps]


def test_one_prompt_and_several(source, capsys, tokenizer):
    """Decoded tokens are printed, of several prompts each as if it were alone."""
    prompts, options = (
        ["def f(x):\n    ", "import os", "", "  é 漢字 <s>"],
        ["--max-tokens", 25, "--temperature", 0],
    )
    texts = []
    for prompt in prompts:
        run(source, "--prompt", prompt, *options)
        out, err = capsys.readouterr()
        ids, new = continuation(source, prompt, 25)
        texts.append(tokenizer.decode(ids + new))
        assert texts[-1].startswith(prompt)
        assert out == texts[-1] + "\n"
        assert re.search(r"\[25 tokens in \d+\.\d s\]\n$", err)
    run(source, *(word for prompt in prompts for word in ("--prompt", prompt)), *options)
    wanted = [f"=== {i}: {prompts[i - 1]!r}\n{text}\n\n" for i, text in enumerate(texts, 1)]
    assert capsys.readouterr().out == "".join(wanted)


def test_a_text_begins_as_documents_did_in_training(source, tmp_path, capsys, tokenizer, refused):
    """Also if nothing stood before them; a folder that does not say so gets a note."""
    options = ["--max-tokens", 20, "--temperature", 0]
    cases = {
        "two": ({"begin": [2, 1], "end": []}, [2, 1], False),
        "nothing": ({"begin": [], "end": []}, [], False),
        "older": (None, [tokenizer.eos_id], True),
    }
    for name, (documents, start, noted) in cases.items():
        folder = edit_run(shutil.copytree(source, tmp_path / name), documents=documents)
        run(folder, "--prompt", "import os", *options)
        out, err = capsys.readouterr()
        ids, new = continuation(folder, "import os", 20, start=start)
        assert out == tokenizer.decode(ids + new) + "\n", name
        assert ("does not record how documents began" in err) == noted
    refused(generate.main, [tmp_path / "nothing", "--prompt", ""], "an empty prompt has no tokens")


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
    options = (
        "--prompt",
        "x",
        "--max-tokens",
        30,
        "--temperature",
        1.5,
        "--top-k",
        50,
        "--top-p",
        0.9,
        "--no-stop",
    )
    run(source, *options, "--seed", 3)
    first = capsys.readouterr().out
    ids, new = continuation(source, "x", 30, Sampling(1.5, 50, 0.9), seed=3)
    assert first == tokenizer.decode(ids + new) + "\n"
    run(source, *options, "--seed", 4)
    assert capsys.readouterr().out != first


@pytest.mark.parametrize(("no_stop", "status"), [([], 0), (["--no-stop"], 130)])
def test_the_end_of_text_and_ctrl_c(source, capsys, tokenizer, monkeypatch, no_stop, status):
    """The end is not printed (tests/model/test_generation.py has how it ends a row); Ctrl-C leaves what was written."""
    new = tokenizer.encode("x y")[len(tokenizer.encode("x")) :]

    def steps(model, prompts, *, stop, **options):
        assert stop == (None if no_stop else tokenizer.eos_id)
        yield from [[token] for token in (*new, tokenizer.eos_id)]
        if status:
            raise KeyboardInterrupt

    monkeypatch.setattr(generate, "generate", steps)
    run(source, "--prompt", "x", *no_stop, expect=status)
    out, err = capsys.readouterr()
    assert out == "x y\n"
    assert err.startswith(f"[{len(new) + 1} tokens in ")


def test_a_prompt_from_a_pipe_an_empty_one_and_one_that_is_not_utf8(
    source, capsys, monkeypatch, refused
):
    """From a shell, and from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    run(source, "--max-tokens", 5, "--temperature", 0)
    assert capsys.readouterr().out.startswith("import os")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    refused(generate.main, [source], "standard input is empty")
    refused(generate.main, [source, "--prompt", os.fsdecode(b"\xe9")], "cannot encode this text")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xe9"), encoding="utf-8"))
    refused(generate.main, [source], "utf-8")


ALONE = """
import sys
for name in ("torchtitan", "torchdata", "triton", "transformers", "datasets", "tensorboard"):
    sys.modules[name] = None  # as if it were not installed: import fails, find_spec finds nothing
import socket
class NoNetwork(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket was opened")
socket.socket = NoNetwork
from interdomain.tools.generate import main
sys.exit(main(sys.argv[1:]))
"""


def test_it_needs_little_and_ends_quietly_when_its_reader_leaves(source, tmp_path):
    """torch, safetensors and sentencepiece alone. `generate ... | head`: not a word, and the status of a program that SIGPIPE
    ended, as with cat."""
    (tmp_path / "alone.py").write_text(ALONE)
    command = f"{sys.executable} alone.py {source} --prompt x --no-stop --max-tokens 5000"
    bash = ["bash", "-c", f"{command} | head -c 20; exit $PIPESTATUS"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.stdout.startswith("x")
    assert done.stderr == ""
    assert done.returncode == 141


def test_what_cannot_be_is_one_paragraph(source, tmp_path, refused):
    """tests/model/test_pretrained.py has all that can be wrong with a folder."""
    for folder, options, words in (
        (source, ["--max-tokens", 0], "--max-tokens must be at least 1"),
        (source, ["--temperature", -1], "temperature"),
        (tmp_path, [], "is not a model folder"),
    ):
        refused(generate.main, [folder, "--prompt", "x", *options], words)
