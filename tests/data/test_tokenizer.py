"""Every kind of tokenizer keeps the same promises: round trips, control tokens, streams."""

import hashlib
import json
import operator
import random
import shutil

import pytest

from interdomain.data import StreamDecoder, TokenCorpus, load_tokenizer
from interdomain.data.readers import read_documents
from interdomain.data.tokenizer import train_sentencepiece
from interdomain.tools import prepare_data

from ..common import write_rows
from .common import train_by_library

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
    files = list(read_documents(["stdlib"], max_bytes=200_000))
    windows_files = [text.replace("\n", "\r\n") for text in files]
    for text in TEXTS + files + windows_files:
        ids = any_kind.encode(text)
        assert any_kind.decode(ids) == text
        assert any_kind.bos_id not in ids
        assert any_kind.eos_id not in ids
        assert max(ids, default=0) < any_kind.vocab_size
    assert any_kind.decode(any_kind.encode("a b", add_eos=True)) == "a b"


def test_sentencepiece_is_in_llama_2s_style(files):
    tokenizer = load_tokenizer(files["sentencepiece"])
    ids = [tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert ids == [0, 1, 2, None]
    assert len(tokenizer.encode("2024")) == 5  # the dummy prefix and four digits
    indented = tokenizer.encode("\n        x")
    assert len(indented) == len(tokenizer.encode("\nx")) + 1


def test_a_vocabulary_is_trained_on_lines_of_any_length(tmp_path):
    model = train_sentencepiece(["x" * 9000, "consequence " * 9000], 300)
    (tmp_path / "tokenizer.model").write_bytes(model)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    assert len(tokenizer.encode("consequence consequence")) == 2
    with pytest.raises(ValueError, match=r"cannot be trained on this text: it is empty\."):
        train_sentencepiece(["", "\n"], 300)


def stream(tokenizer, ids, after=()):
    """Returns the texts that a stream gives out token by token, and the rest at its end."""
    decoder = StreamDecoder(tokenizer, after)
    return [decoder.push(i) for i in ids], decoder.flush()


def assert_stream_equals_decode(tokenizer, ids):
    pushed, rest = stream(tokenizer, ids)
    assert "".join(pushed) + rest == tokenizer.decode(ids), ids


def test_a_stream_equals_decode_after_every_prompt(any_kind):
    for text in TEXTS:
        ids = any_kind.encode(text[:150])
        for n in range(len(ids) + 1):
            pushed, _ = stream(any_kind, ids[:n])
            # Text that was given out is a prefix of the final text: it has no half characters.
            assert text.startswith("".join(pushed))
            continued, rest = stream(any_kind, ids[n:], after=ids[:n])
            assert "".join([*pushed, *continued, rest]) == any_kind.decode(ids)


def test_a_stream_gives_out_words_at_once(any_kind):
    pushed, rest = stream(any_kind, any_kind.encode("return self.value"))
    assert all(pushed[1:])  # a dummy prefix has no text
    assert rest == ""


def assert_streams_of_any_ids(tokenizer):
    """A model may produce broken UTF-8, control tokens in a character, and ids without a token."""
    rng = random.Random(0)
    ids = range(tokenizer.vocab_size)
    broken = [i for i in ids if "\ufffd" in tokenizer.decode([i])]
    assert len(broken) > 100
    special = [tokenizer.eos_id, 0, 1, 2, *tokenizer.encode(" \n")]
    for _ in range(1500):
        population = [rng.choice(ids), *rng.choices(broken, k=2), *special]
        assert_stream_equals_decode(tokenizer, rng.choices(population, k=rng.randrange(12)))


def test_a_stream_of_any_ids_equals_decode(any_kind):
    assert_streams_of_any_ids(any_kind)


@pytest.mark.parametrize("dropped", [True, False])
def test_a_stream_of_a_tokenizer_that_drops_spaces_at_the_start(tmp_path, dropped):
    """`decode` drops only spaces at a text's start, by sentencepiece's default (T5, Llama 1)."""
    options = {"remove_extra_whitespaces": dropped, "add_dummy_prefix": dropped}
    tokenizer = train_by_library(tmp_path, **options)
    assert_streams_of_any_ids(tokenizer)
    word = tokenizer.encode("return")[0]
    for piece in ("\u2581", "<0x0A>"):
        space = tokenizer._processor.piece_to_id(piece)
        ids = [space] * 100 + [word, space, word]
        assert_stream_equals_decode(tokenizer, ids)
        pushed, rest = stream(tokenizer, ids[3:], after=ids[:3])
        assert tokenizer.decode(ids).endswith("".join(pushed) + rest)


def prepare(folder, texts, tokenizer, *options):
    """Makes the corpus FOLDER/corpus of these texts. Returns the command's exit status."""
    write_rows(folder / "rows.jsonl", [{"text": text} for text in texts])
    line = f"--input {folder}/rows.jsonl --tokenizer {tokenizer} --output {folder}/corpus"
    return prepare_data.main([*line.split(), "--validation-fraction", "0", *options])


def assert_documents(folder, texts, tokenizer):
    corpus = TokenCorpus(folder, verify=True)
    assert corpus.vocab_size == tokenizer.vocab_size
    for document, text in zip(corpus.shards[0], texts, strict=True):
        assert document.tolist() == tokenizer.encode(text, add_eos=True)


facts = operator.attrgetter("sha256", "vocab_size", "bos_id", "eos_id", "pad_id", "unk_id", "data")


def test_one_file_carries_everything_into_folders_and_corpora(any_kind, tmp_path):
    """BOS and EOS, which stand in a second file at the source, are not lost."""
    path = any_kind.write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [any_kind.file]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == any_kind.sha256
    assert prepare(tmp_path, TEXTS, tmp_path) == 0
    for source in (tmp_path, str(path), tmp_path / "corpus"):
        again = load_tokenizer(source)
        assert facts(again) == facts(any_kind)
    assert_documents(tmp_path / "corpus", filter(None, TEXTS), any_kind)


LLAMA_3 = (  # its pattern: tiktoken's engine needs a stack for spaces in a row, and panics
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def copy_ranks(files, path, **changes):
    """Copies the rank file of tiktoken, and its description with changes."""
    shutil.copy(files["tiktoken"], path)
    description = json.loads(files["tiktoken"].with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(description | changes))


def test_a_text_that_the_library_cannot_encode_is_a_bad_document(files, tmp_path, capfd):
    path = tmp_path / "x.tiktoken"
    copy_ranks(files, path, pattern=LLAMA_3)
    texts = ["a", "b", " " * 1_000_000, "c"]
    assert prepare(tmp_path, texts, path, "--workers", "2") == 2
    words = "rows.jsonl cannot be read: line 3: the tokenizer cannot encode this text ("
    assert words in capfd.readouterr().err
    assert prepare(tmp_path, texts, path, "--leave-out-bad") == 0
    assert "rows.jsonl, line 3: the tokenizer cannot" in capfd.readouterr().err
    assert_documents(tmp_path / "corpus", ["a", "b", "c"], load_tokenizer(path))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_is_no_bad_document(error, tokenizer, monkeypatch):
    def interrupted(text):
        raise error

    monkeypatch.setattr(tokenizer, "_encode", interrupted)
    with pytest.raises(error):
        tokenizer.encode("a")


def test_a_control_token_that_the_vocabulary_lacks_is_named(files, tmp_path):
    shutil.copy(files["json"], tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    copy_ranks(files, tmp_path / "x.tiktoken", eos_token="<end>")
    for name in ("tokenizer.json", "x.tiktoken"):
        words = f"{name} is not a tokenizer: .*eos_token is '<end>', which is no token"
        with pytest.raises(ValueError, match=words):
            load_tokenizer(tmp_path / name)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"no EOS.*tokenizer_config\.json"):
        load_tokenizer(tmp_path / "tokenizer.json").encode("a", add_eos=True)


@pytest.mark.parametrize("name", ["x.model", "nothing", "."])
def test_a_missing_tokenizer_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="There is no tokenizer"):
        load_tokenizer(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.model", "nonsense"),
        ("x.txt", "text"),
        ("x.json", "{}"),
        ("x.tiktoken", "YQ== 0\n"),  # ranks without a description
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} is not a tokenizer"):
        load_tokenizer(tmp_path / name)


def no_network(url):
    raise ConnectionError("no network")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine", "Unknown encoding mine"),
        ("cl100k_base", "no network"),
    ],
)
def test_encodings_of_tiktoken_come_from_its_cache(tmp_path, monkeypatch, name, message):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("requests.get", no_network)
    with pytest.raises(ValueError, match=f"TIKTOKEN_CACHE_DIR.*{message}"):
        load_tokenizer(f"tiktoken:{name}")
