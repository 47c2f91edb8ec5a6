"""The one exception that a user is meant to read."""


class TCError(Exception):
    """A problem that the user can mend: what was given, what is allowed, what to do.

    `run.py` prints the message alone and exits with status 1; anything else that is raised is a
    fault of this package and keeps its traceback.

    Attributes:
        told: whether it has been printed.
    """

    told = False


def one_message(problems: list[str], heading: str) -> TCError:
    """Joins several problems to one error, a line each, under a heading."""
    return TCError("\n".join([heading, *(f"  - {p}" for p in problems)]))
