"""The exported tokenizer as transformers loads it, against the original: token for token."""

import random

import pytest

from interdomain.data import load_tokenizer
from interdomain.data.readers import read_documents
from interdomain.data.tokenizer_export import padding_id, write_for_transformers

from .common import train_by_library
from .test_tokenizer import TEXTS

PARTS = [
    *" \n\r\t\u2581\0\ufeff\u00a0\ufffdßéﬁ漢字🙂a7_",
    *["  ", "\r\n", "▁a", "👩‍👩‍👧", "e\u0301", "'ll", "'S", "1234", "!!", "x="],
    *["<s>", "</s>", "<unk>", "<0x41>", "<|endoftext|>"],
]


def difficult_texts():
    """Returns random texts of difficult parts and characters, and lines of real files."""
    rng = random.Random(0)
    texts = list(TEXTS)
    for _ in range(300):
        texts.append("".join(rng.choices(PARTS, k=rng.randrange(1, 25))))
        characters = rng.choices(range(0xD800), k=15) + rng.choices(range(0x300), k=15)
        texts.append("".join(map(chr, characters)))
    for text in read_documents(["stdlib"], max_bytes=100_000):
        texts += [text, *text.splitlines()[:100]]
    return texts


@pytest.mark.parametrize("kind", ["sentencepiece", "json"])
def test_auto_tokenizer_agrees_token_for_token(kind, files, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="the extra `dev` is not installed")
    tokenizer = load_tokenizer(files[kind])
    tokenizer.write(tmp_path)
    write_for_transformers(tokenizer, tmp_path)
    # AutoTokenizer reads the configuration of an exported model, too, and does not know the model.
    (tmp_path / "config.json").write_text('{"model_type": "interdomain", "vocab_size": 1000}')
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.bos_token_id == tokenizer.bos_id
    assert loaded.eos_token_id == tokenizer.eos_id
    for text in difficult_texts():
        ids = tokenizer.encode(text)
        assert loaded(text).input_ids == ids, text
        decoded = tokenizer.decode(ids)
        assert loaded.decode(ids) == decoded
        assert loaded.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == decoded
    # A batch has only what the model takes, and padding on the left.
    batch = loaded(["a", TEXTS[12]], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch.attention_mask[0][0] == 0
    assert batch.input_ids[0][0] == loaded.pad_token_id == padding_id(tokenizer)
    # This project loads the folder by its own kind, and transformers' file without the original.
    assert load_tokenizer(tmp_path).sha256 == tokenizer.sha256
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.bos_id == tokenizer.bos_id
    assert again.eos_id == tokenizer.eos_id
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)


def test_tiktokens_files_are_not_converted(files, tmp_path):
    with pytest.raises(NotImplementedError, match=r"tiktoken\.json is not converted"):
        write_for_transformers(load_tokenizer(files["tiktoken"]), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option",
    [
        {"model_type": "unigram"},
        {"normalization_rule_name": "nmt_nfkc"},
        {"byte_fallback": False},
        {"remove_extra_whitespaces": True},
    ],
)
def test_a_tokenizer_without_an_exact_counterpart_is_not_written(tmp_path, option):
    tokenizer = train_by_library(tmp_path, **option)
    (tmp_path / "out").mkdir()
    words = "only sentencepiece BPE|differs from the original"
    with pytest.raises(NotImplementedError, match=words):
        write_for_transformers(tokenizer, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
