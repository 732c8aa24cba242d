"""Recall tasks: the tokens before an answer determine it, and bytes do not depend on shards."""

import numpy as np
import pytest

from interdomain.data import PackedDataset, TokenCorpus, load_tokenizer
from interdomain.data.synthetic import TASKS
from interdomain.tools import prepare_data

from ..common import bytes_in

SMALL = {
    "mqar": {"length": 48, "items": 8, "vocab": 41},
    "selective-copying": {"length": 47, "items": 9, "vocab": 12},
}


def mqar_answer(text, p):
    """Returns the word at p from the words before: it follows its key as it did the first time."""
    key = p - 1
    while text[key][0] != "k":
        key -= 1
    return text[text.index(text[key]) + p - key]


def copying_answer(text, p):
    """Returns the word at p from the words before: `copy` comes before the copies, in order."""
    copy = text.index("copy")
    items = [word for word in text[:copy] if word != "."]
    return items[p - copy - 1]


SOLVERS = {"mqar": mqar_answer, "selective-copying": copying_answer}


def prepare(kind, folder, options=""):
    line = f"--synthetic {kind} --synthetic-examples 1000 --validation-fraction 0.1"
    for name, value in SMALL[kind].items():
        line += f" --synthetic-{name} {value}"
    line += f" --output {folder} {options}"
    assert prepare_data.main(line.split()) == 0
    return folder


@pytest.fixture(scope="module", params=list(TASKS))
def corpus(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "corpus"
    return request.param, prepare(request.param, folder)


def documents(folder, split="train"):
    shards = TokenCorpus(folder, split, verify=True).shards
    return [document for shard in shards for document in shard]


def distinct(folder, split="train"):
    return {ids.tobytes() for ids in documents(folder, split)}


def test_every_answer_is_determined_by_the_tokens_before_it(corpus):
    kind, folder = corpus
    task = TASKS[kind](**SMALL[kind])
    tokenizer = load_tokenizer(folder)
    for split in ("train", "validation"):
        answers = documents(folder, f"{split}-answers")
        for ids, marks in zip(documents(folder, split), answers, strict=True):
            assert len(ids) == len(marks) == task.length
            text = tokenizer.decode(ids).split()
            assert tokenizer.encode(" ".join(text), add_eos=True) == ids.tolist()
            assert marks.sum() == task.answers
            for p in np.flatnonzero(marks):
                assert SOLVERS[kind](text[:p], p) == text[p]


def test_no_example_occurs_twice_and_another_seed_makes_others(corpus, tmp_path):
    kind, folder = corpus
    train = distinct(folder)
    validation = distinct(folder, "validation")
    assert len(validation) == 100
    assert len(train | validation) == 1000
    other = prepare(kind, tmp_path / "other", "--synthetic-seed 1")
    assert train.isdisjoint(distinct(other))


def test_the_same_bytes_whatever_the_shards(corpus, tmp_path):
    kind, folder = corpus
    assert bytes_in(prepare(kind, tmp_path / "again")) == bytes_in(folder)
    cut = prepare(kind, tmp_path / "cut", "--shard-tokens 5000")
    assert len(TokenCorpus(cut).shards) > 5
    for split in ("train", "train-answers", "validation", "validation-answers"):
        found = np.concatenate(documents(cut, split))
        assert np.array_equal(found, np.concatenate(documents(folder, split)))


@pytest.mark.parametrize("examples", [1, 3])
def test_windows_are_examples_and_only_their_answers_are_counted(corpus, examples):
    kind, folder = corpus
    task = TASKS[kind](**SMALL[kind])
    window = examples * task.length
    dataset = PackedDataset(TokenCorpus(folder), window, seed=0, shuffle=False)
    assert dataset.targets == examples * task.answers
    samples = range(len(dataset))
    tokens = np.concatenate([dataset[g][:-1] for g in samples])
    ids = np.concatenate(documents(folder))
    assert np.array_equal(tokens, ids[: len(tokens)])
    marks = np.concatenate(documents(folder, "train-answers"))
    counted = [dataset.counted(g) for g in samples]
    assert {row.sum() for row in counted} == {dataset.targets}
    # A target is the token after the one at which it is predicted.
    assert np.array_equal(np.concatenate(counted)[:-1], marks[1 : len(tokens)] == 1)


@pytest.mark.parametrize("corpus", ["mqar"], indirect=True)
def test_mqar_has_lists_of_equal_length(corpus):
    """Training has 1, 2, 4 or 8 lists of keys and values in a row, validation has one."""
    _, folder = corpus
    layouts = {"train": set(), "validation": set()}  # where a key occurs for the first time
    for split, found in layouts.items():
        for ids in documents(folder, split):
            _, first = np.unique(ids[:-1:2], return_index=True)
            found.add(tuple(sorted(first.tolist())))
    # Pairs of a list, and after them its queries, which are as many.
    keys = np.arange(8)
    lists = [8, 4, 2, 1]
    wanted = [tuple((keys + 2 * n * (keys // n)).tolist()) for n in lists]
    assert layouts == {"train": set(wanted), "validation": {wanted[0]}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("mqar --synthetic-items 128", "at least 2 * items + 4"),
        ("mqar --synthetic-vocab 17", "at least 2 * items + 2 words"),
        ("mqar --synthetic-vocab 70000", "at most 65,536 words"),
        ("mqar --synthetic-examples 0", "--synthetic-examples must be at least 1"),
        ("selective-copying --synthetic-length 33", "at least 2 * items + 2"),
        ("mqar --synthetic-examples 20 --validation-fraction 0.01", "fall into train"),
    ],
)
def test_wrong_options_are_refused(options, message, tmp_path, capsys):
    line = f"--synthetic {options} --output {tmp_path}/out"
    assert prepare_data.main(line.split()) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_window_that_cuts_examples_is_refused(corpus):
    kind, folder = corpus
    length = SMALL[kind]["length"]
    with pytest.raises(ValueError, match=f"to {length}, or a multiple"):
        PackedDataset(TokenCorpus(folder), length + 1, seed=0)
