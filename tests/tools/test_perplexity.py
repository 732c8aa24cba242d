"""The tokens and bytes that `evaluate --perplexity` reads: documents as in training, bytes as in the corpus."""

import shutil

import pytest

from interdomain.checkpoint.pretrained import load_pretrained
from interdomain.data import Documents, load_tokenizer
from interdomain.tools import evaluate
from interdomain.tools._evaluate import perplexity
from interdomain.tools._evaluate.perplexity import read_spans

from .checkpoints import edit_run
from .test_evaluate import TEXTS, direct_losses, read_results, unigram, write_rows

BYTES = [len(text.encode()) for text in TEXTS]


@pytest.fixture
def corpus(tmp_path):
    return str(write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS]))


@pytest.fixture
def model_of(exported_model, tmp_path):
    """model_of(documents): an exported model that records how its documents began and ended in training."""

    def model_of(documents):
        folder = shutil.copytree(exported_model("interdomain")[1], tmp_path / "model")
        return edit_run(folder, documents=documents)

    return model_of


def test_joined_documents_of_a_model_whose_documents_begin_with_bos(corpus, tokenizer):
    """A window is read after the first document's BOS. The others have theirs in the text."""
    reader = load_tokenizer(tokenizer.path)
    reader.documents = Documents((1,), (2,))
    stream = []
    for text in TEXTS:
        stream += [1, *tokenizer.encode(text), 2]
    stream = stream[1:]
    ids, sizes = read_spans(corpus, reader, len(stream), packed=True)
    assert ids[0].tolist() == stream
    assert sizes.sum() == sum(BYTES)
    apart, _ = read_spans(corpus, reader, 60)
    assert apart.tolist() == read_spans(corpus, tokenizer, 60)[0].tolist()


def test_bits_are_per_byte_of_the_documents_not_of_what_a_tokenizer_leaves_of_them(
    corpus, tmp_path
):
    """Unknown characters and white space are text too."""
    reader = unigram(tmp_path / "unigram.model")
    total = 0
    for text, nbytes in zip(TEXTS, BYTES, strict=True):
        ids = reader.encode(text, add_eos=True)
        total += len(ids)
        assert len(reader.decode(ids).encode()) != nbytes
        assert perplexity.text_sizes(reader, text, ids).sum() == nbytes
    _, sizes = read_spans(corpus, reader, total, packed=True)
    assert sizes.sum() == sum(BYTES)
    assert (sizes >= 0).all()
    # The tokenizer knows none of these characters.
    (tmp_path / "unknown.txt").write_text("漢字🙂" * 9)
    ids = reader.encode("漢字🙂" * 9, add_eos=True)
    _, sizes = read_spans(str(tmp_path / "unknown.txt"), reader, len(ids))
    assert sizes.sum() == 9 * 10


@pytest.mark.parametrize(
    ("documents", "start"),
    [({"begin": [2, 1], "end": []}, [2, 1]), (None, [2])],
    ids=["two", "older"],
)
def test_windows_begin_as_documents_did_in_training(
    model_of, corpus, tmp_path, capsys, documents, start
):
    """The folder's record says how. An older record does not, and is read after EOS."""
    folder = model_of(documents)
    options = f"--lengths 60 --perplexity {corpus} --output {tmp_path / 'out'}"
    assert evaluate.main([str(folder), *options.split()]) == 0
    assert ("does not record how documents began" in capsys.readouterr().out) == (documents is None)
    (row,) = read_results(tmp_path / "out")["perplexity"]
    model, tokenizer = load_pretrained(folder)
    losses = direct_losses(model, read_spans(corpus, tokenizer, 60), 60, *start)
    assert row["perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-5)


def test_a_window_needs_a_token_before_it(model_of, corpus, tmp_path, refused):
    folder = model_of({"begin": [], "end": []})
    options = f"--lengths 60 --perplexity {corpus} --output {tmp_path / 'out'}"
    refused(evaluate.main, [folder, *options.split()], "no token stood between the documents")
