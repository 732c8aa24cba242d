"""The benchmark of the data tools runs and counts right; its figures are nobody's on a test machine."""

import json

import pytest

from interdomain.tools import bench_data

pytest.importorskip("pyarrow", reason="the extra `data` is not installed")


def test_tokens_per_second_by_processes(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some words to be counted, again and again.\n" * 400)
    options = ["--input", tmp_path / "a.txt", "--vocab-size", 310, "--megabytes", 0.05, "--workers", 1, 2]
    options += ["--formats", "parquet", "--seq-len", 16, "--output", tmp_path / "out"]
    # A vocabulary that such a text can train: sentencepiece names the bound for a text.
    assert bench_data.main([str(option) for option in options]) in (0, 2)
    if "Vocabulary size" in capsys.readouterr().err:
        pytest.fail("the text is too small for the tokenizer of this test")
    found = json.loads((tmp_path / "out" / "data.json").read_text())
    assert found["status"] == "complete"
    library, one, two = found["tables"]["text to tokens"]["rows"]
    assert (library["of the library's"], one["processes"], two["processes"]) == (1.0, 1, 2)
    assert 0 < one["of the library's"] < 1
    assert 20 < one["peak MB"] < two["peak MB"] < 2000
    assert one["tokens/s"] / one["MB/s"] == pytest.approx(library["tokens/s"] / library["MB/s"])
    assert found["tables"]["prepared tokens to training"]["rows"][0]["tokens/s"] > 0
    assert str(tmp_path) not in (tmp_path / "out" / "data.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--formats", "xml"], "--formats xml: unknown"),
        (["--megabytes", "0"], "--megabytes must be positive"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--input", "none.txt"], "No file matches"),
    ],
)
def test_bad_options(options, message, capsys):
    assert bench_data.main(options) == 2
    assert message in capsys.readouterr().err
