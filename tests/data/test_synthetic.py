"""Recall tasks: what the tokens before an answer say is the answer, on every example; the same
bytes however they are made.
"""

import numpy as np
import pytest

from interdomain.data import PackedDataset, TokenCorpus, load_tokenizer, read_manifest
from interdomain.data.synthetic import TASKS
from interdomain.tools import prepare_data

SMALL = {
    "mqar": dict(length=48, items=8, vocab=41),
    "selective-copying": dict(length=47, items=9, vocab=12),
}


def recalled(text, p):
    """Word p, which is behind a key: so many words behind the same key's first place."""
    key = next(q for q in range(p - 1, -1, -1) if text[q][0] == "k")
    return text[text.index(text[key]) + p - key]


def copied(text, p):
    """The number of tokens behind `copy` is the number of those that have been copied."""
    begin = text.index("copy")
    return [word for word in text[:begin] if word != "."][p - begin - 1]


SOLVERS = {"mqar": recalled, "selective-copying": copied}  # from text[:p] alone


def prepare(kind, folder, *options, expect=0):
    task = [f"--synthetic-{name}={value}" for name, value in SMALL[kind].items()]
    arguments = [
        "--synthetic",
        kind,
        *task,
        "--synthetic-examples=3000",
        "--output",
        folder,
        *options,
    ]
    assert prepare_data.main([str(argument) for argument in arguments]) == expect
    return folder


@pytest.fixture(scope="module", params=list(TASKS))
def corpus(request, tmp_path_factory):
    kind = request.param
    return kind, prepare(
        kind, tmp_path_factory.mktemp(kind) / "corpus", "--validation-fraction=0.1"
    )


def documents(folder, split):
    return [
        document for shard in TokenCorpus(folder, split, verify=True).shards for document in shard
    ]


def test_what_came_before_determines_every_answer(corpus):
    kind, folder = corpus
    task = TASKS[kind](**SMALL[kind])
    tokenizer = load_tokenizer(folder)
    every = {}
    for split in ("train", "validation"):
        every[split] = set()
        rows = zip(documents(folder, split), documents(folder, f"{split}-answers"), strict=True)
        for ids, marks in rows:
            text = tokenizer.decode(ids).split()
            assert (len(ids), len(marks), len(text)) == (task.length, task.length, task.length - 1)
            assert ids[-1] == tokenizer.eos_id
            assert tokenizer.encode(" ".join(text), add_eos=True) == ids.tolist()
            assert marks.sum() == task.answers
            assert not marks[0]
            assert all(SOLVERS[kind](text[:p], p) == text[p] for p in np.flatnonzero(marks))
            every[split].add(ids.tobytes())
    assert len(every["train"]) + len(every["validation"]) == 3000  # no example twice
    assert not every["train"] & every["validation"]
    assert len(every["validation"]) == 300


def test_the_same_bytes_whatever_the_shards(corpus, tmp_path):
    kind, folder = corpus

    def contents(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def stream(folder, split):
        return np.concatenate(documents(folder, split)).tobytes()

    fraction = "--validation-fraction=0.1"
    again, cut, other = (tmp_path / name for name in ("again", "cut", "other"))
    assert contents(prepare(kind, again, fraction)) == contents(folder)
    prepare(kind, cut, fraction, "--shard-tokens=10000")
    assert len(TokenCorpus(cut).shards) > 5
    for split in read_manifest(folder)["splits"]:
        assert stream(cut, split) == stream(folder, split)
    prepare(kind, other, fraction, "--synthetic-seed=1")
    assert not {*map(bytes, documents(other, "train"))} & {*map(bytes, documents(folder, "train"))}


def test_windows_are_examples_and_their_answers_are_counted_exactly(corpus):
    kind, folder = corpus
    task = TASKS[kind](**SMALL[kind])
    ids = documents(folder, "train")
    marks = documents(folder, "train-answers")
    for examples in (1, 3):
        dataset = PackedDataset(TokenCorpus(folder), examples * task.length, seed=0, shuffle=False)
        assert dataset.targets == examples * task.answers
        for g in range(len(dataset)):
            counted = dataset.counted(g)
            assert counted.sum() == dataset.targets
            window, flags = (
                np.concatenate(rows[g * examples : (g + 1) * examples]) for rows in (ids, marks)
            )
            assert np.array_equal(dataset[g][:-1], window)
            assert np.array_equal(counted[:-1], flags[1:] == 1)


@pytest.mark.parametrize("corpus", ["mqar"], indirect=True)
def test_mqar_has_lists_of_equal_length(corpus):
    """Where keys that were not seen before come, in training all numbers of lists, in validation
    one.
    """
    _, folder = corpus
    found = {"train": set(), "validation": set()}
    for split, layouts in found.items():
        for ids in documents(folder, split):
            keys = ids[:-1:2].tolist()
            layouts.add(tuple(t for t in range(24) if keys[t] not in keys[:t]))
    lists = [tuple(24 // n * k + i for k in range(n) for i in range(8 // n)) for n in (1, 2, 4, 8)]
    assert found == {"train": set(lists), "validation": {lists[0]}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--synthetic mqar --synthetic-items 128", "at least 2 * items + 4"),
        ("--synthetic mqar --synthetic-vocab 17", "at least 2 * items + 2 words"),
        ("--synthetic mqar --synthetic-items 0", "at least 1"),
        ("--synthetic mqar --synthetic-vocab 70000", "at most 65,536 words"),
        ("--synthetic mqar --synthetic-examples 0", "--synthetic-examples must be at least 1"),
        ("--synthetic selective-copying --synthetic-length 33", "at least 2 * items + 2"),
        ("--synthetic selective-copying --synthetic-vocab 5", "must have at least 6 words"),
        (
            "--synthetic mqar --synthetic-examples 20 --validation-fraction 0.01",
            "fall into train train-answers alone",
        ),
    ],
)
def test_bad_options(options, message, tmp_path, capsys):
    assert prepare_data.main([*options.split(), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_window_that_cuts_examples_is_refused(corpus, tmp_path):
    kind, folder = corpus
    with pytest.raises(ValueError, match=f"to {SMALL[kind]['length']}, or a multiple"):
        PackedDataset(TokenCorpus(folder), SMALL[kind]["length"] + 1, seed=0)
