"""A fixture of all commands."""

import pytest


@pytest.fixture
def refused(capsys):
    """refused(main, argv, *words): the command ends with status 2 and with one paragraph, which has these words."""

    def refused(main, argv, *words):
        capsys.readouterr()
        assert main([str(word) for word in argv]) == 2, argv
        _, begins, paragraph = capsys.readouterr().err.partition("error: ")  # behind progress bars
        assert (begins, paragraph.count("\n")) == ("error: ", 1), paragraph
        for word in words:
            assert word in paragraph, paragraph

    return refused
