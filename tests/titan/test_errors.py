"""Who speaks when a run ends on a user's mistake."""

import pytest

from interdomain.titan import errors


@pytest.mark.parametrize(("rank", "begins"), [("0", "error: the disk"), ("3", "error: rank 3: the disk")])
def test_rank_0_speaks_at_once_and_others_only_if_they_are_left_alone(rank, begins, monkeypatch, capsys):
    waited = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    with pytest.raises(SystemExit) as end:
        errors.stop("the disk is full")
    assert end.value.code == 1
    assert capsys.readouterr().err.strip().startswith(begins)
    assert waited == ([] if rank == "0" else [errors.GRACE_SECONDS])  # torchrun ends them meanwhile


def test_only_refusals_are_turned_into_a_paragraph(capsys):
    @errors.one_paragraph
    def check(error):
        raise error

    with pytest.raises(SystemExit):
        check(FileNotFoundError("no such shard"))
    assert "error: no such shard" in capsys.readouterr().err
    with pytest.raises(KeyError):  # a fault of ours keeps its traceback
        check(KeyError("x"))
