"""Round trips, and text that arrives token by token."""

import random
import sysconfig
from pathlib import Path

import pytest

from interdomain.data import SentencePieceTokenizer, StreamDecoder, check_vocab, load_tokenizer
from interdomain.data.documents import read_documents
from interdomain.tools.train_tokenizer import train_sentencepiece

NASTY = [
    "",
    " ",
    "   ",
    "\n",
    "\r\n",
    " leading and trailing ",
    "\t\tif x:\r\n\t\t    return\t\r\n",
    "def f(x):\n    if x:\n        return  x\n\n\n",
    "emoji 🙂👩‍👩‍👧 flags 🇯🇵, 漢字, ελληνικά, עברית, e\u0301 and \u00e9",
    "\0 nul \ufeff bom \u2028 separators \u00a0\u3000 spaces",
    "<s>text that names</s> control <unk> tokens <0x0A>",
    "12345 3.14159 0x0A",
    "\ufffd",
    "🙂",
    "x" * 5000,
]


@pytest.mark.parametrize("text", NASTY)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id}.intersection(ids)


def test_round_trip_of_real_files(tokenizer):
    root = Path(sysconfig.get_path("stdlib"))
    paths = [*sorted(root.glob("*.py"))[:80], *sorted(root.glob("encodings/*.py"))[:20]]
    texts = [path.read_bytes().decode() for path in paths]
    texts += [text.replace("\n", "\r\n").replace("    ", "\t") for text in texts[:10]]
    batch = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in batch] == texts
    assert batch[:5] == [tokenizer.encode(text) for text in texts[:5]]
    assert batch == tokenizer.encode_batch(texts, num_threads=1)


def test_special_ids_are_llama_2s(tokenizer):
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2, None)
    plain = tokenizer.encode("a b")
    assert tokenizer.encode("a b", add_bos=True, add_eos=True) == [1, *plain, 2]
    assert tokenizer.encode("", add_eos=True) == [2]
    assert tokenizer.encode_batch(["a b", ""], add_bos=True, add_eos=True) == [[1, *plain, 2], [1, 2]]
    assert tokenizer.decode([1, *plain, 2]) == "a b"
    assert tokenizer.vocab_size == 600


def test_digits_stand_alone_and_indentation_does_not(tokenizer):
    assert len(tokenizer.encode("2024")) == 5  # the dummy prefix and four digits
    assert len(tokenizer.encode("\n" + 8 * " " + "x")) - len(tokenizer.encode("\nx")) == 1


def stream(tokenizer, ids):
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(i) for i in ids], decoder.flush()


@pytest.mark.parametrize("text", NASTY)
def test_stream_equals_decode_at_every_length(tokenizer, text):
    ids = tokenizer.encode(text[:200])
    for n in range(len(ids) + 1):
        pieces, rest = stream(tokenizer, ids[:n])
        assert "".join(pieces) + rest == tokenizer.decode(ids[:n])
        # What has been given out stays true: it is a prefix of the final text, without half characters.
        assert text.startswith("".join(pieces))


@pytest.mark.parametrize("text", NASTY)
def test_stream_after_every_prompt(tokenizer, text):
    ids = tokenizer.encode(text[:200])
    for n in range(len(ids) + 1):
        given, _ = stream(tokenizer, ids[:n])
        decoder = StreamDecoder(tokenizer, after=ids[:n])
        continued = "".join(map(decoder.push, ids[n:])) + decoder.flush()
        assert "".join(given) + continued == tokenizer.decode(ids)


def test_stream_of_a_vocabulary_without_words(tmp_path):
    """So small that a space and a letter are no piece: the space before the first word is still not part of the text."""
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece(read_documents(["stdlib"], max_bytes=200_000), 360))
    small = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    for text in ("a b", " a", "def f"):
        ids = small.encode(text)
        pieces, rest = stream(small, ids)
        assert "".join(pieces) + rest == small.decode(ids) == text


def test_stream_gives_text_at_once(tokenizer):
    ids = tokenizer.encode("return self.value")
    pieces, rest = stream(tokenizer, ids)
    assert pieces[0] in ("", "return")  # a lone dummy prefix has no text
    assert all(pieces[1:])
    assert rest == ""
    pieces, rest = stream(tokenizer, tokenizer.encode("🙂")[-4:])
    assert (pieces, rest) == (["", "", "", "🙂"], "")


def test_stream_of_any_ids_equals_decode(tokenizer):
    """A model may produce anything: broken UTF-8, control tokens in the middle of a character, unknown tokens."""
    rng = random.Random(0)
    byte = 3  # <0x00>
    leads = [
        byte + b for b in (0x20, 0x41, 0x80, 0x82, 0xAC, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0x9F, 0xF4, 0xF8)
    ]
    space = tokenizer.encode(" ")[0]
    for _ in range(20_000):
        kinds = (rng.randrange(600), rng.choice(leads), rng.choice(leads), rng.randrange(3), space)
        ids = [rng.choice(kinds) for _ in range(rng.randrange(10))]
        pieces, rest = stream(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids), ids


def test_load_tokenizer(tokenizer, model_file, tmp_path):
    for path in (model_file, str(model_file), model_file.parent):
        loaded = load_tokenizer(path)
        assert (loaded.sha256, loaded.vocab_size) == (tokenizer.sha256, 600)
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="no tokenizer file"):
        load_tokenizer(tmp_path / "no.model")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("data", [b"", b"not a model", b"\0" * 1000])
def test_damaged_model_file(tmp_path, data):
    (tmp_path / "x.model").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.model .* is not a sentencepiece model"):
        SentencePieceTokenizer(tmp_path / "x.model")


def test_truncated_model_file(tmp_path, model_file):
    data = model_file.read_bytes()
    (tmp_path / "x.model").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="is not a sentencepiece model"):
        SentencePieceTokenizer(tmp_path / "x.model")


def test_check_vocab():
    check_vocab(2048, 2048)
    check_vocab(2000, 2048)
    with pytest.raises(ValueError, match=r"The tokenizer has 32,000 ids, the model's vocab_size is 2,048"):
        check_vocab(32_000, 2048)
