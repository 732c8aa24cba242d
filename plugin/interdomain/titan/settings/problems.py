"""Problems of a configuration. They are collected, so that a user sees all of them at once."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec

P = ParamSpec("P")


class SettingsError(ValueError):
    """Problems of a configuration.

    Args:
        problems: One text for each problem.
    """

    def __init__(self, *problems: str) -> None:
        """Makes one message of all problems, with a line for each if there are several."""
        self.problems = problems
        message = problems[0]
        if len(problems) > 1:
            message = f"{len(problems)} problems of the settings:"
            for problem in problems:
                message += f"\n  - {problem}"
        super().__init__(message)


class Problems(list[str]):
    """A list of problems.

    Example:
        problems = Problems()
        with problems.collect():
            check_one_thing(job)
        with problems.collect():
            check_another(job)
        problems.raise_all()
    """

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Adds the message of a ValueError that the block raises, and goes on after the block."""
        try:
            yield
        except SettingsError as e:
            self.extend(e.problems)
        except ValueError as e:
            self.append(str(e))

    def raise_all(self) -> None:
        """Raises a SettingsError with every problem once, if there are any."""
        if self:
            raise SettingsError(*dict.fromkeys(self))


def raises_all(check: Callable[P, Iterator[str]]) -> Callable[P, None]:
    """Decorator for a check that yields problems: it raises a SettingsError with all of them."""

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        Problems(check(*args, **kwargs)).raise_all()

    return checked
