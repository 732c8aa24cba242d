"""tiktoken and Hugging Face's tokenizer.json: the same promises as sentencepiece's, and text that arrives in pieces."""

import base64
import hashlib
import json
import os
import random
import subprocess
import sys

import pytest

from interdomain.data import StreamDecoder, load_tokenizer
from interdomain.data.documents import read_documents

from .test_tokenizer import NASTY

tokenizers = pytest.importorskip("tokenizers", reason="the extra `data` is not installed")
pytest.importorskip("tiktoken", reason="the extra `data` is not installed")

PATTERN = (  # cl100k's
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"""
    r""" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
CONTROL = {"<s>": 600, "<|endoftext|>": 601}
TEXTS = [*NASTY, "<|endoftext|> in text", "<s>", "don't DON'T we'll", "aaaaaaaaaaaa", "12 345678 3.5", "a\n\n\n  b \n"]


def byte_level(path, vocab_size=600, specials=("<s>", "<|endoftext|>")):
    """A byte-level BPE in a tokenizer.json, trained on a part of the standard library."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((d.text for d in read_documents(["stdlib"], max_bytes=200_000)), trainer)
    # A post-processor that adds BOS, as many files have: not ours to apply.
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(path))
    return path


def rank_file(path):
    """tiktoken's files with the merges of a byte-level BPE of 600 - 256 merges."""
    made = json.loads(byte_level(path.with_name("trained.json"), specials=()).read_text())
    to_byte = {c: b for b, c in _alphabet().items()}
    tokens = sorted(made["model"]["vocab"].items(), key=lambda item: item[1])
    ordered = [bytes([b]) for b in range(256)]
    ordered += [t for text, _ in tokens if len(t := bytes(to_byte[c] for c in text)) > 1]
    path.write_text("".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(ordered)))
    described = {"pattern": PATTERN, "special_tokens": CONTROL, "bos_token": None, "eos_token": "<|endoftext|>"}
    path.with_suffix(".json").write_text(json.dumps(described))
    path.with_name("trained.json").unlink()
    return path


def _alphabet():
    """GPT-2's character for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    found = {"tiktoken": rank_file(folder / "ranks.tiktoken")}
    (folder / "hub").mkdir()
    found["json"] = byte_level(folder / "hub" / "tokenizer.json")
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|endoftext|>"}
    (folder / "hub" / "tokenizer_config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(params=["tiktoken", "json"])
def tokenizer(request, files):
    return load_tokenizer(files[request.param])


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_without_control_tokens(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.bos_id, tokenizer.eos_id}.intersection(ids)
    assert max(ids, default=0) < tokenizer.vocab_size


def test_bos_and_eos_come_where_they_are_asked_for(tokenizer):
    plain, eos = tokenizer.encode("a b"), tokenizer.eos_id
    assert tokenizer.encode("a b", add_eos=True) == [*plain, eos]
    for threads in (-1, 1, 2):
        assert tokenizer.encode_batch(["a b", ""], add_eos=True, num_threads=threads) == [[*plain, eos], [eos]]
        assert tokenizer.encode_batch(TEXTS, num_threads=threads) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.decode([*plain, eos, *plain]) == "a ba b"
    if tokenizer.bos_id is None:
        with pytest.raises(ValueError, match="has no BOS token"):
            tokenizer.encode("a", add_bos=True)
    else:
        assert tokenizer.encode("a b", add_bos=True) == [0, *plain]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_equals_decode_at_every_length(tokenizer, text):
    ids = tokenizer.encode(text[:150])
    for n in range(len(ids) + 1):
        stream = StreamDecoder(tokenizer)
        given = "".join(map(stream.push, ids[:n]))
        assert text.startswith(given)
        assert given + stream.flush() == tokenizer.decode(ids[:n])
        stream = StreamDecoder(tokenizer, after=ids[:n])
        assert given + "".join(map(stream.push, ids[n:])) + stream.flush() == tokenizer.decode(ids)


def test_a_text_that_tiktoken_cannot_split_is_an_error(files):
    """It panics, which is no Exception and cannot be sent from one process to another."""
    tokenizer, spaces = load_tokenizer(files["tiktoken"]), " " * 10**6
    assert tokenizer.decode(tokenizer.encode(spaces[:99_999] + "x")) == spaces[:99_999] + "x"
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a  b", text])):
        with pytest.raises(
            ValueError, match=r"run of spaces and newlines has 1,000,000 .* begins with 'x = 1'; shorten"
        ):
            encode(spaces + "x = 1")


def test_stream_gives_text_at_once(tokenizer):
    stream = StreamDecoder(tokenizer)
    assert all(map(stream.push, tokenizer.encode("return self.value")))
    assert stream.flush() == ""
    stream = StreamDecoder(tokenizer)
    assert list(map(stream.push, tokenizer.encode("🙂")))[-1] == "🙂"


def test_stream_of_any_ids_equals_decode(tokenizer):
    """Broken UTF-8, control tokens in the middle of a character, ids that no token has."""
    rng = random.Random(0)
    broken = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([i])]
    assert len(broken) > 100
    for _ in range(4000):
        kinds = (rng.randrange(tokenizer.vocab_size), rng.choice(broken), rng.choice(broken), tokenizer.eos_id)
        ids = [rng.choice(kinds) for _ in range(rng.randrange(12))]
        stream = StreamDecoder(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids), ids


def test_one_file_carries_everything(tokenizer, tmp_path):
    """BOS and EOS stand in a second file where the tokenizer came from; in a corpus they must not be lost."""
    path = tokenizer.write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [tokenizer.file]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == tokenizer.sha256
    for again in (load_tokenizer(tmp_path), load_tokenizer(path)):
        for name in ("sha256", "vocab_size", "bos_id", "eos_id", "pad_id", "unk_id", "data"):
            assert getattr(again, name) == getattr(tokenizer, name), name
        assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_a_corpus_of_each_kind(tokenizer, tmp_path):
    from interdomain.data import TokenCorpus
    from interdomain.tools import prepare_data

    tokenizer.write(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    arguments = ["--input", tmp_path / "rows.jsonl", "--tokenizer", tmp_path, "--output", tmp_path / "out"]
    assert prepare_data.main([*map(str, arguments), "--validation-fraction", "0"]) == 0
    corpus = TokenCorpus(tmp_path / "out", verify=True)
    assert (corpus.vocab_size, corpus.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
    found = [d.tolist() for d in corpus.shards[0]]
    assert found == [tokenizer.encode(text, add_eos=True) for text in TEXTS if text]
    assert load_tokenizer(tmp_path / "out").sha256 == tokenizer.sha256


def test_eos_without_a_configuration(files, tmp_path):
    """A file alone: the usual names, if they leave no choice."""
    alone = tmp_path / "tokenizer.json"
    alone.write_bytes(files["json"].read_bytes())
    loaded = load_tokenizer(alone)
    assert (loaded.bos_id, loaded.eos_id) == (0, 1)
    byte_level(alone, specials=("</s>", "<|endoftext|>"))
    assert load_tokenizer(alone).eos_id is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load_tokenizer(alone).eos_id == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(ValueError, match="'<end>', which is not in the tokenizer"):
        load_tokenizer(alone)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged"):
        load_tokenizer(alone)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": 1}', '"x"'])
def test_damaged_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer that the tokenizers library reads"):
        load_tokenizer(tmp_path / "tokenizer.json")


def damaged(files, folder, change):
    ranks, described = files["tiktoken"].read_text(), json.loads(files["tiktoken"].with_suffix(".json").read_text())
    ranks, described = change(ranks, described)
    (folder / "x.tiktoken").write_text(ranks)
    (folder / "x.json").write_text(described if isinstance(described, str) else json.dumps(described))
    return folder / "x.tiktoken"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r, d: (r + "nonsense\n", d), "line 601 of the ranks is 'nonsense'"),
        (lambda r, d: (r[200:], d), "no token in base64|all 256 bytes"),
        (lambda r, d: (r, {**d, "pattern": "("}), "is not a tiktoken encoding"),
        (lambda r, d: (r, {**d, "pattern": None}), "is not a tiktoken encoding"),
        (lambda r, d: (r, {**d, "eos_token": "<none>"}), "is not a tiktoken encoding"),
        (lambda r, d: (r, "{"), "are not ranks and their description"),
    ],
)
def test_damaged_ranks(files, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(damaged(files, tmp_path, change))


def test_missing_files(files, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x\.tiktoken needs X\.json|There is no"):
        load_tokenizer(tmp_path / "x.tiktoken")
    (tmp_path / "x.tiktoken").write_text(files["tiktoken"].read_text())
    with pytest.raises(FileNotFoundError, match=r"x\.json, what describes x\.tiktoken"):
        load_tokenizer(tmp_path / "x.tiktoken")


def test_named_encodings(tmp_path):
    with pytest.raises(ValueError, match="tiktoken knows no encoding 'mine', it has cl100k_base"):
        load_tokenizer("tiktoken:mine")
    code = "import socket; socket.socket.connect = None; socket.getaddrinfo = None\n"
    code += "from interdomain.data import load_tokenizer; load_tokenizer('tiktoken:cl100k_base')"
    environment = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "ValueError: tiktoken cannot load cl100k_base" in done.stderr
    assert "TIKTOKEN_CACHE_DIR" in done.stderr
