"""Text from an exported model: what is printed is what the model says, on a machine that has torch and little else."""

import io
import shutil
import subprocess
import sys

import pytest

from interdomain.checkpoint.pretrained import load_pretrained
from interdomain.model.generation import Sampling
from interdomain.model.generation import generate as generate_tokens
from interdomain.tools import generate

from .checkpoints import edit_run

GREEDY = Sampling(temperature=0)


@pytest.fixture
def source(exported_model):
    return exported_model("interdomain")[1]


def run(folder, *options):
    assert generate.main([str(folder), *map(str, options)]) == 0


def text_of(folder, prompt, max_tokens, start, sampling=GREEDY, seed=0):
    """Returns the prompt and what the model says after it. `start`: token ids that stand before the prompt."""
    model, tokenizer = load_pretrained(folder)
    ids = [*start, *tokenizer.encode(prompt)]
    steps = generate_tokens(
        model,
        [ids],
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        vocab_size=tokenizer.vocab_size,
    )
    return tokenizer.decode(ids + [token for (token,) in steps])


def test_one_prompt_and_several(source, capsys, tokenizer):
    """Each of several prompts is continued as if it were the only one."""
    options = ["--max-tokens", 25, "--temperature", 0]
    prompts = []
    several = ""
    for i, prompt in enumerate(["def f(x):\n    ", "", "  é 漢字 <s>"], 1):
        run(source, "--prompt", prompt, *options)
        out, err = capsys.readouterr()
        text = text_of(source, prompt, 25, [tokenizer.eos_id])
        assert out == text + "\n"
        assert err.startswith("[25 tokens in ")
        prompts += ["--prompt", prompt]
        several += f"=== {i}: {prompt!r}\n{text}\n\n"
    run(source, *prompts, *options)
    assert capsys.readouterr().out == several


@pytest.mark.parametrize(
    ("documents", "start"),
    [
        ({"begin": [2, 1], "end": []}, [2, 1]),
        ({"begin": [], "end": []}, []),
        (None, [2]),
    ],
    ids=["two", "nothing", "older"],
)
def test_a_text_begins_as_documents_did_in_training(
    source, tmp_path, capsys, refused, documents, start
):
    """A folder that does not record how they began gets a note. EOS, token 2, stands before the text then."""
    folder = edit_run(shutil.copytree(source, tmp_path / "model"), documents=documents)
    run(folder, "--prompt", "import os", "--max-tokens", 20, "--temperature", 0)
    out, err = capsys.readouterr()
    assert out == text_of(folder, "import os", 20, start) + "\n"
    assert ("does not record how documents began" in err) == (documents is None)
    if not start:
        refused(generate.main, [folder, "--prompt", ""], "an empty prompt has no tokens")


def yes():
    return True


def test_a_terminal_is_given_nothing_to_obey(source, capsys, monkeypatch):
    """Control characters are escaped on a terminal, and pass through a pipe."""
    options = ("--prompt", "\x1b[2Jé\u3000👩\u200d👧\x9b\n\a", "--max-tokens", 1)
    run(source, *options)
    assert "\x1b[2Jé\u3000👩\u200d👧\x9b\n\a" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", yes)
    run(source, *options)
    out = capsys.readouterr().out
    assert "\\x1b[2Jé\u3000👩\u200d👧\\x9b\n\\x07" in out
    assert not set("\x1b\x9b\a") & set(out)


def test_sampling_options_and_seed(source, capsys, tokenizer):
    options = "--prompt x --max-tokens 30 --temperature 1.5 --top-k 50 --top-p 0.9 --no-stop --seed"
    run(source, *options.split(), 3)
    sampling = Sampling(1.5, 50, 0.9)
    text = text_of(source, "x", 30, [tokenizer.eos_id], sampling, seed=3)
    assert capsys.readouterr().out == text + "\n"


def test_the_end_of_text_and_ctrl_c(source, capsys, tokenizer, monkeypatch):
    """The end is not printed (tests/model/test_generation.py has how it ends a row). Ctrl-C leaves what was written."""
    new = tokenizer.encode("x y")[len(tokenizer.encode("x")) :]

    def steps(model, prompts, *, stop, **options):
        for token in (*new, tokenizer.eos_id):
            yield [token]
        if stop is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(generate, "generate", steps)
    run(source, "--prompt", "x")
    assert capsys.readouterr().out == "x y\n"
    assert generate.main([str(source), "--prompt", "x", "--no-stop"]) == 130
    assert capsys.readouterr().out == "x y\n"


def test_a_prompt_from_a_pipe_an_empty_one_and_one_that_is_not_utf8(
    source, capsys, monkeypatch, refused
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    run(source, "--max-tokens", 5)
    assert capsys.readouterr().out.startswith("import os")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    refused(generate.main, [source], "standard input is empty")
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
    """It needs torch, safetensors and sentencepiece only. `generate ... | head` prints no error, as `cat`: SIGPIPE ends it."""
    (tmp_path / "alone.py").write_text(ALONE)
    command = f"{sys.executable} alone.py {source} --prompt x --no-stop --max-tokens 5000"
    bash = ["bash", "-c", f"{command} | head -c 20; exit $PIPESTATUS"]
    done = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("x")
    assert done.stderr == ""
    assert done.returncode == 141


def test_bad_requests(source, tmp_path, refused):
    """tests/model/test_pretrained.py has all that can be wrong with a folder."""
    refused(generate.main, [source, "--temperature", "nan"], "temperature", "got nan")
    refused(generate.main, [tmp_path, "--prompt", "x"], "is not a model folder")
