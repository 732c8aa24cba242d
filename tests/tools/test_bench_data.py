"""The benchmark of the data tools runs; its figures are nobody's on a test machine."""

from interdomain.tools import bench_data


def test_tokens_per_second_by_processes(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some words to be counted, again and again.\n" * 400)
    options = ["--input", tmp_path / "a.txt", "--vocab-size", 310, "--megabytes", 0.1]
    assert bench_data.main([str(option) for option in options]) == 0
    _, library, *prepared, read = capsys.readouterr().out.splitlines()
    assert library.startswith("the library alone")
    assert all(row.split()[0] == "prepare_data," for row in prepared)
    rates = [float(row.split()[-1].replace(",", "")) for row in (library, *prepared)]
    assert 0 < max(rates[1:]) < rates[0]  # a whole command costs more than the library's call
    assert "tokens/s read by one thread" in read
    assert bench_data.main(["--input", str(tmp_path / "none.txt")]) == 2
    assert "No file matches" in capsys.readouterr().err
