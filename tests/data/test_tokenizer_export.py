"""The folder's tokenizer as transformers loads it, against the original: token for token, over text
made to break it.
"""

import json
import random
from pathlib import Path

import pytest
import sentencepiece

from interdomain.data import load_tokenizer, tokenizer_export
from interdomain.data.readers import read_documents
from interdomain.data.tokenizer_export import write_for_transformers

from .test_tokenizer import TEXTS

PARTS = [
    *" \n\r\t\u2581\0\ufeff\u00a0\ufffdßéﬁ漢字🙂a7_",
    *["  ", "\r\n", "▁a", "👩‍👩‍👧", "e\u0301", "'ll", "'S", "1234", "!!", "x="],
    *["<s>", "</s>", "<unk>", "<0x41>", "<|endoftext|>"],
]


def fuzz():
    """Random text of what tokenizers trip over, and lines of real files."""
    rng = random.Random(0)
    texts = list(TEXTS)
    for _ in range(300):
        texts.append("".join(rng.choices(PARTS, k=rng.randrange(1, 25))))
        texts.append(
            "".join(map(chr, rng.choices(range(0xD800), k=15) + rng.choices(range(0x300), k=15)))
        )
    for path in sorted(Path(json.__file__).parent.parent.glob("*.py"))[:8]:
        text = path.read_text("utf-8", "ignore")
        texts += [text, *text.splitlines()[:100]]
    return texts


@pytest.fixture(scope="module", params=["sentencepiece", "json"])
def exported(request, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    tokenizer = load_tokenizer(files[request.param])
    tokenizer.write(folder)
    write_for_transformers(tokenizer, folder)
    # What stands beside them in a model's folder: AutoTokenizer reads it, and knows no such model.
    (folder / "config.json").write_text(
        json.dumps({"model_type": "interdomain", "vocab_size": 1000})
    )
    return tokenizer, folder


def test_auto_tokenizer_agrees_token_for_token(exported, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="the extra `dev` is not installed")
    tokenizer, folder = exported
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    texts = fuzz()
    ours = [tokenizer.encode(text) for text in texts]
    assert [
        text for text, a, b in zip(texts, ours, loaded(texts).input_ids, strict=True) if a != b
    ] == []
    for text, ids in zip(texts, ours, strict=True):
        assert loaded.decode(ids) == tokenizer.decode(ids), text
        assert loaded.decode(
            [*ids, tokenizer.eos_id], skip_special_tokens=True
        ) == tokenizer.decode(ids)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    batch = loaded(["a", TEXTS[12]], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}  # all that the model takes
    assert batch.attention_mask[0][0] == 0  # on the left
    assert batch.input_ids[0][0] == loaded.pad_token_id == tokenizer_export.padding_id(tokenizer)
    # Here too: the folder as its own kind, and transformers' two files alone, without the original,
    # as a tokenizer.json.
    assert load_tokenizer(folder).sha256 == tokenizer.sha256
    again = load_tokenizer(folder / "tokenizer.json")
    assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert all(again.encode(text) == tokenizer.encode(text) for text in TEXTS)


def test_tiktokens_files_are_not_converted(files, tmp_path):
    with pytest.raises(NotImplementedError, match=r"tiktoken\.json is not converted"):
        write_for_transformers(load_tokenizer(files["tiktoken"]), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model_type", "unigram"),
        ("normalization_rule_name", "nmt_nfkc"),
        ("byte_fallback", False),
        ("remove_extra_whitespaces", True),
    ],
)
def test_what_has_no_exact_counterpart_is_not_written(tmp_path, option, value):
    lines = (
        line for text in read_documents(["stdlib"], max_bytes=20_000) for line in text.splitlines()
    )
    options = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "vocab_size": 400,
    }
    options |= {
        "hard_vocab_limit": False,
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
        option: value,
    }
    prefix = str(tmp_path / "tokenizer")
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=lines, model_prefix=prefix, **options
    )
    (tmp_path / "out").mkdir()
    with pytest.raises(
        NotImplementedError, match=r"only sentencepiece BPE|differs from the original"
    ):
        write_for_transformers(load_tokenizer(tmp_path / "tokenizer.model"), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
