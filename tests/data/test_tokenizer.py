"""Every kind of tokenizer keeps the same promises: round trips, control tokens, text that arrives
token by token.
"""

import hashlib
import io
import json
import random
import shutil
import sysconfig
from pathlib import Path

import pytest
import sentencepiece

from interdomain.data import StreamDecoder, TokenCorpus, load_tokenizer
from interdomain.data.tokenizer import train_sentencepiece
from interdomain.tools import prepare_data

TEXTS = [
    *("", " ", "   ", "\n", "\r\n", "🙂", "\ufffd"),
    *("x" * 5000, " leading and trailing ", "<|endoftext|> in text", "<s>"),
    "\t\tif x:\r\n\t\t    return\t\r\n",
    "def f(x):\n    if x:\n        return  x\n\n\n",
    "emoji 🙂👩‍👩‍👧 flags 🇯🇵, 漢字, ελληνικά, עברית, e\u0301 and \u00e9",
    "\0 nul \ufeff bom \u2028 separators \u00a0\u3000 spaces",
    "<s>text that names</s> control <unk> tokens <0x0A>",
    "12 345678 3.14159 0x0A don't DON'T we'll aaaaaaaaaaaa\n\n\n  b \n",
]


@pytest.fixture(params=["sentencepiece", "tiktoken", "json"])
def any_kind(request, files):
    return load_tokenizer(files[request.param])


def test_round_trip_without_control_tokens(any_kind):
    root = Path(sysconfig.get_path("stdlib"))
    real = [path.read_bytes().decode() for path in sorted(root.glob("*.py"))[:20]]
    texts = [*TEXTS, *real, *(text.replace("\n", "\r\n") for text in real[:10])]
    rows = [any_kind.encode(text) for text in texts]
    assert [any_kind.decode(ids) for ids in rows] == texts
    assert not {any_kind.bos_id, any_kind.eos_id}.intersection(i for ids in rows for i in ids)
    assert max(i for ids in rows for i in ids) < any_kind.vocab_size
    assert any_kind.decode(any_kind.encode("a b", add_eos=True)) == "a b"


def test_sentencepiece_is_in_llama_2s_style(files):
    tokenizer = load_tokenizer(files["sentencepiece"])
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (
        0,
        1,
        2,
        None,
    )
    assert len(tokenizer.encode("2024")) == 5  # the dummy prefix and four digits
    assert len(tokenizer.encode("\n" + 8 * " " + "x")) - len(tokenizer.encode("\nx")) == 1


def test_a_vocabulary_is_trained_on_lines_of_any_length(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(
        train_sentencepiece(["x" * 9000, "consequence " * 9000], 300)
    )
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    assert len(tokenizer.encode("consequence consequence")) == 2
    with pytest.raises(
        ValueError, match=r"A vocabulary of 300 cannot be trained on this text: it is empty\."
    ):
        train_sentencepiece(["", "\n"], 300)


def stream(tokenizer, ids, after=()):
    decoder = StreamDecoder(tokenizer, after)
    return [decoder.push(i) for i in ids], decoder.flush()


def test_a_stream_equals_decode_at_every_length_and_after_every_prompt(any_kind):
    for text in TEXTS:
        ids = any_kind.encode(text[:150])
        for n in range(len(ids) + 1):
            given, _ = stream(any_kind, ids[:n])
            # What has been given out stays true: it is a prefix of the final text, without half
            # characters.
            assert text.startswith("".join(given))
            continued, rest = stream(any_kind, ids[n:], after=ids[:n])
            assert "".join([*given, *continued]) + rest == any_kind.decode(ids)
    given, rest = stream(any_kind, any_kind.encode("return self.value"))
    assert all(given[1:])  # at once; a lone dummy prefix has no text
    assert rest == ""


def test_a_stream_of_any_ids_equals_decode(any_kind):
    """A model may produce anything: broken UTF-8, control tokens in the middle of a character, ids
    that no token has.
    """
    rng = random.Random(0)
    size = any_kind.vocab_size
    broken = [i for i in range(size) if "\ufffd" in any_kind.decode([i])]
    assert len(broken) > 100
    space = any_kind.encode(" ")[0]
    for _ in range(2000):
        kinds = (
            rng.randrange(size),
            rng.choice(broken),
            rng.choice(broken),
            any_kind.eos_id,
            rng.randrange(3),
            space,
        )
        ids = [rng.choice(kinds) for _ in range(rng.randrange(12))]
        given, rest = stream(any_kind, ids)
        assert "".join(given) + rest == any_kind.decode(ids), ids


@pytest.mark.parametrize("dropped", [True, False])
def test_a_stream_of_a_tokenizer_that_drops_spaces_at_the_start(tmp_path, dropped):
    """sentencepiece's default, of T5 and Llama 1: `decode` drops the spaces that a text begins
    with, and keeps all others.
    """
    text = ["several words of a text, and some more words", "  def f(x):", "a    b"] * 20
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(text),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        remove_extra_whitespaces=dropped,
        add_dummy_prefix=dropped,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    space = tokenizer._processor.piece_to_id("\u2581")
    word, *_ = tokenizer.encode("words")
    newline = tokenizer._processor.piece_to_id("<0x0A>")
    rng = random.Random(0)
    rows = [
        rng.choices([space, space, word, newline, 1, rng.randrange(tokenizer.vocab_size)], k=8)
        for _ in range(300)
    ]
    for ids in ([space] * 100 + [word, space, word], [newline] * 100 + [word, space, word], *rows):
        given, rest = stream(tokenizer, ids)
        assert "".join(given) + rest == tokenizer.decode(ids), ids
        given, rest = stream(tokenizer, ids[3:], after=ids[:3])
        assert tokenizer.decode(ids).endswith("".join(given) + rest), ids


def write_rows(folder, texts):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_one_file_carries_everything_into_folders_and_corpora(any_kind, tmp_path):
    """BOS and EOS stand in a second file where the tokenizer came from; in a corpus they must not
    be lost.
    """
    path = any_kind.write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [any_kind.file]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == any_kind.sha256
    rows = write_rows(tmp_path, TEXTS)
    line = f"--input {rows} --tokenizer {tmp_path} --validation-fraction 0 --output {tmp_path}/out"
    assert prepare_data.main(line.split()) == 0
    for again in (
        load_tokenizer(tmp_path),
        load_tokenizer(str(path)),
        load_tokenizer(tmp_path / "out"),
    ):
        for name in ("sha256", "vocab_size", "bos_id", "eos_id", "pad_id", "unk_id", "data"):
            assert getattr(again, name) == getattr(any_kind, name), name
    corpus = TokenCorpus(tmp_path / "out", verify=True)
    assert corpus.vocab_size == any_kind.vocab_size
    assert [d.tolist() for d in corpus.shards[0]] == [
        any_kind.encode(text, add_eos=True) for text in TEXTS if text
    ]


LLAMA_3 = (  # its pattern: tiktoken's engine needs a stack for spaces in a row, and panics
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def test_a_text_that_the_library_cannot_encode_is_a_bad_document(files, tmp_path, capfd):
    path = tmp_path / "x.tiktoken"
    shutil.copy(files["tiktoken"], path)
    described = json.loads(files["tiktoken"].with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(described | {"pattern": LLAMA_3}))
    rows = write_rows(tmp_path, ["a", "b", " " * 1_000_000, "a"])
    line = f"--input {rows} --tokenizer {path} --validation-fraction 0 --workers 2 --output {tmp_path}/out"
    assert prepare_data.main(line.split()) == 2
    words = "rows.jsonl cannot be read: line 3: the tokenizer cannot encode this text ("
    assert words in capfd.readouterr().err
    assert prepare_data.main([*line.split(), "--leave-out-bad"]) == 0
    assert "rows.jsonl, line 3: the tokenizer cannot" in capfd.readouterr().err
    tokenizer = load_tokenizer(path)
    made = [document.tolist() for document in TokenCorpus(tmp_path / "out", verify=True).shards[0]]
    assert made == [tokenizer.encode(x, add_eos=True) for x in ("a", "b", "a")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_says_nothing_of_the_text_is_no_bad_document(error, tokenizer, monkeypatch):
    def interrupted(text):
        raise error

    monkeypatch.setattr(tokenizer, "_encode", interrupted)
    with pytest.raises(error):
        tokenizer.encode("a")


def test_a_control_token_that_the_vocabulary_lacks_is_named(files, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(files["json"].read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (tmp_path / "x.tiktoken").write_bytes(files["tiktoken"].read_bytes())
    described = json.loads(files["tiktoken"].with_suffix(".json").read_text())
    (tmp_path / "x.json").write_text(json.dumps(described | {"eos_token": "<end>"}))
    for name in ("tokenizer.json", "x.tiktoken"):
        with pytest.raises(
            ValueError,
            match=f"{name} is not a tokenizer: .*eos_token is '<end>', which is no token",
        ):
            load_tokenizer(tmp_path / name)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"no EOS.*tokenizer_config\.json"):
        load_tokenizer(tmp_path / "tokenizer.json").encode("a", add_eos=True)


def test_ranks_of_whisper_have_an_empty_token(files, tmp_path):
    """Its line is `= 50256`. tiktoken's own reader leaves empty lines out."""
    ranks = tmp_path / "multilingual.tiktoken"
    ranks.write_bytes(files["tiktoken"].read_bytes() + b"= 598\n\n")
    ranks.with_suffix(".json").write_bytes(files["tiktoken"].with_suffix(".json").read_bytes())
    tokenizer = load_tokenizer(ranks)
    without = load_tokenizer(files["tiktoken"])
    assert [tokenizer.encode(text) for text in TEXTS] == [without.encode(text) for text in TEXTS]
    assert tokenizer.decode([598]) == ""


def test_what_is_no_tokenizer(files, tmp_path, monkeypatch):
    for name in ("x.model", "x.tiktoken", "nothing", "."):
        with pytest.raises(FileNotFoundError, match="There is no tokenizer"):
            load_tokenizer(tmp_path / name)
    ranks = files["tiktoken"].read_bytes()
    shutil.copy(files["tiktoken"].with_suffix(".json"), tmp_path / "x.json")
    for name, content in (
        ("x.model", b""),
        ("y.model", b"\0" * 1000),
        ("x.txt", b"text"),
        ("a.json", b"{}"),
        ("alone.tiktoken", ranks),
        ("x.tiktoken", ranks + b"nonsense\n"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a tokenizer"):
            load_tokenizer(tmp_path / name)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "requests.get", lambda url: (_ for _ in ()).throw(ConnectionError("no network"))
    )
    for name, message in (("mine", "Unknown encoding mine"), ("cl100k_base", "no network")):
        with pytest.raises(ValueError, match=f"TIKTOKEN_CACHE_DIR.*{message}"):
            load_tokenizer(f"tiktoken:{name}")
