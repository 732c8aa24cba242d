"""The folder's tokenizer as transformers loads it, against the original: token for token, over text made to break it."""

import json
import random
import sysconfig
from pathlib import Path

import pytest
import sentencepiece

from interdomain.data import load_tokenizer, tokenizer_export
from interdomain.data.tokenizer_export import write_for_transformers

from ..common import small_tokenizer
from .test_tokenizer_kinds import TEXTS, files  # noqa: F401 (a fixture)

pytest.importorskip("tokenizers", reason="the extra `data` is not installed")


def fuzz(n=3000):
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
    parts += [
        "é",
        "e\u0301",
        "漢字",
        "ß",
        "ﬁ",
        "\0",
        "\ufeff",
        "\u00a0",
        "\ufffd",
        "'ll",
        "'S",
        "a",
        "aa",
        "7",
        "1234",
        "_",
        "!!",
        "x=",
    ]
    texts = ["".join(rng.choices(parts, k=rng.randrange(1, 25))) for _ in range(n)]
    texts += [
        "".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0x300)))) for _ in range(30)) for _ in range(n)
    ]
    root = Path(sysconfig.get_path("stdlib"))
    real = [path.read_text("utf-8", "ignore") for path in sorted(root.glob("*.py"))[:40]]
    return [*TEXTS, *texts, *real, *(line for text in real for line in text.splitlines()[:100])]


@pytest.fixture(scope="module", params=["sentencepiece", "tiktoken", "json"])
def exported(request, files, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("exported")
    kinds = dict(files)
    if request.param == "sentencepiece":
        kinds["sentencepiece"] = small_tokenizer(tmp_path_factory.mktemp("model") / "tokenizer.model", 1000)
    tokenizer = load_tokenizer(kinds[request.param])
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
    ours, theirs = tokenizer.encode_batch(texts), loaded(texts).input_ids
    assert [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b] == []
    assert loaded(TEXTS[5]).input_ids == loaded.encode(TEXTS[5]) == tokenizer.encode(TEXTS[5])
    assert (loaded.bos_token_id, loaded.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert loaded.padding_side == "left"
    batch = loaded(["a", TEXTS[5]], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}  # all that the model takes
    assert batch.attention_mask[0][0] == 0
    assert batch.input_ids[0][0] == tokenizer_export.padding_id(tokenizer)
    for text, ids in zip(texts, ours, strict=True):
        assert loaded.decode(ids) == tokenizer.decode(ids), text
        assert loaded.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == tokenizer.decode(ids)


def test_the_folder_loads_as_its_own_kind(exported):
    tokenizer, folder = exported
    again = load_tokenizer(folder)
    assert type(again) is type(tokenizer)
    assert again.sha256 == tokenizer.sha256


def test_a_folder_of_transformers_is_a_tokenizer_of_ours(exported, tmp_path):
    """The other way: both of transformers' files alone, without the original."""
    tokenizer, folder = exported
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    again = load_tokenizer(tmp_path)
    assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


@pytest.mark.parametrize(
    ("place", "control"),
    [
        (lambda rank: rank, {"<s>": 602, "<|endoftext|>": 605}),  # as cl100k_base
        (lambda rank: rank + (rank >= 300), {"<|endoftext|>": 300}),  # as p50k_base
        (lambda rank: rank + 2, {"<s>": 0, "<|endoftext|>": 1}),  # as Mistral's tekken
    ],
    ids=["above", "between", "below"],
)
def test_control_tokens_keep_their_ids(files, tmp_path, place, control):  # noqa: F811
    """Wherever they stand beside the ranks; tokenizers numbers what it is not told from the number of tokens on."""
    import tokenizers

    lines = (line.split() for line in files["tiktoken"].read_text().splitlines())
    (tmp_path / "x.tiktoken").write_text("".join(f"{token} {place(int(rank))}\n" for token, rank in lines))
    described = json.loads(files["tiktoken"].with_suffix(".json").read_text()) | {"special_tokens": control}
    (tmp_path / "x.json").write_text(json.dumps(described))
    tokenizer = load_tokenizer(tmp_path / "x.tiktoken")
    write_for_transformers(tokenizer, tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert {name: made.token_to_id(name) for name in control} == control
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    assert all(made.decode([i]) == tokenizer.decode([i]) for i in range(tokenizer.vocab_size))


@pytest.mark.parametrize(
    "settings", [{"model_type": "unigram"}, {"byte_fallback": False}, {"normalization_rule_name": "nmt_nfkc"}]
)
def test_what_has_no_exact_counterpart_is_not_written(tmp_path, settings):
    from interdomain.data.documents import read_documents

    lines = (line for d in read_documents(["stdlib"], max_bytes=50_000) for line in d.text.splitlines())
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", **settings}
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=lines,
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=400,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    (tmp_path / "out").mkdir()
    with pytest.raises(NotImplementedError, match="only sentencepiece BPE models with byte fallback"):
        write_for_transformers(load_tokenizer(tmp_path / "tokenizer.model"), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wrong_conversion_is_found_before_it_is_written(exported, tmp_path, monkeypatch):
    """A normalizer too many: the comparison with the original sees it."""
    tokenizer, _ = exported

    def lower(parts):
        return parts | {"normalizer": {"type": "Lowercase"}}

    for name in ("_from_sentencepiece", "_from_tiktoken", "_from_json"):
        kind = getattr(tokenizer_export, name)
        monkeypatch.setattr(tokenizer_export, name, lambda t, kind=kind: lower(kind(t)))
    with pytest.raises(NotImplementedError, match="differs from the original"):
        write_for_transformers(tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []
