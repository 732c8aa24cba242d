"""The folder's tokenizer as transformers loads it, against the original: token for token, over text made to break it."""

import json
import random
import sysconfig
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from interdomain.data import load_tokenizer, tokenizer_export
from interdomain.data.readers import read_documents
from interdomain.data.tokenizer_export import write_for_transformers

from .test_tokenizer import TEXTS


def fuzz(n=600):
    """Random text of what tokenizers trip over, and lines of real files."""
    rng = random.Random(0)
    parts = [
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u2581",
        "▁a",
        "<s>",
        "</s>",
        "<unk>",
        "<0x41>",
        "<|endoftext|>",
        "🙂",
        "👩‍👩‍👧",
    ]
    parts += ["é", "e\u0301", "漢字", "ß", "ﬁ", "\0", "\ufeff", "\u00a0", "\ufffd", "'ll", "'S", "a", "aa", "7", "1234"]
    parts += ["_", "!!", "x="]
    texts = ["".join(rng.choices(parts, k=rng.randrange(1, 25))) for _ in range(n)]
    ranges = (0xD800, 0x300)
    texts += ["".join(chr(rng.randrange(rng.choice(ranges))) for _ in range(30)) for _ in range(n)]
    root = Path(sysconfig.get_path("stdlib"))
    real = [path.read_text("utf-8", "ignore") for path in sorted(root.glob("*.py"))[:8]]
    return [*TEXTS, *texts, *real, *(line for text in real for line in text.splitlines()[:100])]


@pytest.fixture(scope="module", params=["sentencepiece", "tiktoken", "json"])
def exported(request, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    tokenizer = load_tokenizer(files[request.param])
    tokenizer.write(folder)
    write_for_transformers(tokenizer, folder)
    # What stands beside them in a model's folder: AutoTokenizer reads it, and knows no such model.
    (folder / "config.json").write_text(json.dumps({"model_type": "interdomain", "vocab_size": 1000}))
    return tokenizer, folder


def test_auto_tokenizer_agrees_token_for_token(exported, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="the extra `dev` is not installed")
    tokenizer, folder = exported
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    texts = fuzz()
    ours, theirs = [tokenizer.encode(text) for text in texts], loaded(texts).input_ids
    assert [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b] == []
    assert loaded(TEXTS[12]).input_ids == loaded.encode(TEXTS[12]) == tokenizer.encode(TEXTS[12])
    assert (loaded.bos_token_id, loaded.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    batch = loaded(["a", TEXTS[12]], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}  # all that the model takes
    assert batch.attention_mask[0][0] == 0  # on the left
    assert batch.input_ids[0][0] == loaded.pad_token_id == tokenizer_export.padding_id(tokenizer)
    for text, ids in zip(texts, ours, strict=True):
        assert loaded.decode(ids) == tokenizer.decode(ids), text
        assert loaded.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == tokenizer.decode(ids)


def test_the_folder_loads_here_too(exported, tmp_path):
    """As its own kind; and transformers' two files alone, without the original, as a tokenizer.json."""
    tokenizer, folder = exported
    again = load_tokenizer(folder)
    assert (type(again), again.sha256) == (type(tokenizer), tokenizer.sha256)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    again = load_tokenizer(tmp_path)
    assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert all(again.encode(text) == tokenizer.encode(text) for text in TEXTS)


@pytest.mark.parametrize(
    ("place", "control"),
    [
        (lambda rank: rank, {"<s>": 602, "<|endoftext|>": 605}),  # as cl100k_base
        (lambda rank: rank + (rank >= 300), {"<|endoftext|>": 300}),  # as p50k_base
        (lambda rank: rank + 2, {"<s>": 0, "<|endoftext|>": 1}),  # as Mistral's tekken
    ],
    ids=["above", "between", "below"],
)
def test_control_tokens_keep_their_ids(files, tmp_path, place, control):
    """Wherever they stand beside the ranks; tokenizers numbers what it is not told from the number of tokens on."""
    lines = (line.split() for line in files["tiktoken"].read_text().splitlines())
    (tmp_path / "x.tiktoken").write_text("".join(f"{token} {place(int(rank))}\n" for token, rank in lines))
    described = json.loads(files["tiktoken"].with_suffix(".json").read_text()) | {"special_tokens": control}
    (tmp_path / "x.json").write_text(json.dumps(described))
    tokenizer = load_tokenizer(tmp_path / "x.tiktoken")
    write_for_transformers(tokenizer, tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert {name: made.token_to_id(name) for name in control} == control
    assert all(made.decode([i]) == tokenizer.decode([i]) for i in range(tokenizer.vocab_size))


@pytest.mark.parametrize(
    "settings", [{"model_type": "unigram"}, {"byte_fallback": False}, {"normalization_rule_name": "nmt_nfkc"}]
)
def test_what_has_no_exact_counterpart_is_not_written(tmp_path, settings):
    lines = (line for text in read_documents(["stdlib"], max_bytes=50_000) for line in text.splitlines())
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", **settings}
    options |= {"vocab_size": 400, "hard_vocab_limit": False, "remove_extra_whitespaces": False, "minloglevel": 2}
    prefix = str(tmp_path / "tokenizer")
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=lines, model_prefix=prefix, **options)
    (tmp_path / "out").mkdir()
    with pytest.raises(NotImplementedError, match=r"only sentencepiece BPE|differs from the original"):
        write_for_transformers(load_tokenizer(tmp_path / "tokenizer.model"), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wrong_conversion_is_found_before_it_is_written(exported, tmp_path, monkeypatch):
    """A normalizer too many: the comparison with the original sees it."""
    tokenizer, _ = exported
    made = tokenizer.converted()
    made.normalizer = tokenizers.normalizers.Lowercase()
    monkeypatch.setattr(tokenizer, "converted", lambda: made)
    with pytest.raises(NotImplementedError, match="differs from the original"):
        write_for_transformers(tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []
