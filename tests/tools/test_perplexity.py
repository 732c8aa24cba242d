"""The tokens and bytes that `evaluate --perplexity` reads: documents as in training, bytes as in the corpus."""

import json
import shutil

import pytest

from interdomain.checkpoint.pretrained import load_pretrained
from interdomain.data import Documents, load_tokenizer
from interdomain.tools import evaluate
from interdomain.tools._evaluate import perplexity
from interdomain.tools._evaluate.perplexity import read_spans

from .checkpoints import edit_run
from .test_evaluate import TEXTS, direct, unigram


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    return path


def test_joined_documents_of_a_model_whose_documents_begin_with_bos(corpus, tokenizer):
    """The first stands behind what a window is read after; the others have it in the text."""
    reader = load_tokenizer(tokenizer.path)
    reader.documents = Documents((1,), (2,))
    documents = [[*tokenizer.encode(text), 2] for text in TEXTS]
    first, *others = documents
    stream = [*first, *(token for ids in others for token in (1, *ids))]
    ids, sizes = read_spans(str(corpus), reader, len(stream), text_field="body", packed=True)
    assert ids[0].tolist() == stream
    assert sizes.sum() == sum(len(text.encode()) for text in TEXTS)
    apart = read_spans(str(corpus), reader, 60, text_field="body")[0]
    assert apart.tolist() == read_spans(str(corpus), tokenizer, 60, text_field="body")[0].tolist()


def test_bits_are_per_byte_of_the_documents_not_of_what_a_tokenizer_leaves_of_them(
    corpus, tmp_path
):
    """Unknown characters and white space are text too."""
    reader = unigram(tmp_path / "unigram.model")
    documents = [reader.encode(text, add_eos=True) for text in TEXTS]
    written = [len(text.encode()) for text in TEXTS]
    total = sum(len(ids) for ids in documents)
    joined = read_spans(str(corpus), reader, total, text_field="body", packed=True)
    assert joined[1].sum() == sum(written)
    assert (joined[1] >= 0).all()
    for ids, text in zip(documents, TEXTS, strict=True):
        assert len(reader.decode(ids).encode()) != len(text.encode())
        assert perplexity.text_sizes(reader, text, ids).sum() == len(text.encode())
    # Nothing that it knows.
    (tmp_path / "unknown.txt").write_text("漢字🙂" * 9)
    ids = reader.encode("漢字🙂" * 9, add_eos=True)
    assert read_spans(str(tmp_path / "unknown.txt"), reader, len(ids))[1].sum() == 9 * 10


@pytest.mark.parametrize(
    ("documents", "start"),
    [({"begin": [2, 1], "end": []}, [2, 1]), (None, [2])],
    ids=["two", "older"],
)
def test_windows_begin_as_documents_did_in_training(
    exported_model, corpus, tmp_path, capsys, documents, start
):
    """As the folder's record says, which an older one does not."""
    folder = edit_run(
        shutil.copytree(exported_model("interdomain")[1], tmp_path / "model"), documents=documents
    )
    options = f"--lengths 60 --text-field body --perplexity {corpus} --output {tmp_path / 'out'}"
    assert evaluate.main([str(folder), *options.split()]) == 0
    assert ("does not record how documents began" in capsys.readouterr().out) == (documents is None)
    (row,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())["perplexity"]
    model, tokenizer = load_pretrained(folder)
    losses = direct(model, read_spans(str(corpus), tokenizer, 60, text_field="body"), 60, *start)
    assert row["perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-5)


def test_a_window_needs_a_token_before_it(exported_model, corpus, tmp_path, refused):
    nothing = {"begin": [], "end": []}
    folder = edit_run(
        shutil.copytree(exported_model("interdomain")[1], tmp_path / "model"), documents=nothing
    )
    options = f"--lengths 60 --text-field body --perplexity {corpus} --output {tmp_path / 'out'}"
    refused(evaluate.main, [folder, *options.split()], "no token stood between the documents")
