"""How a command ends: an exit code, and for what went wrong one line that says all there is to say."""

from __future__ import annotations

import sys
from collections.abc import Callable

from purlin_diffusion.commands.streams import say

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130  # argparse's is the third, a shell's of Ctrl-C the last


class InputError(Exception):
    """An argument that cannot be: said in one line, before any rank starts."""


def ended(command: str, work: Callable[[], int]) -> int:
    """work()'s code. Our own errors are told in their words; of any other the traceback is wanted."""
    try:
        return work()
    except InputError as error:
        return told(command, str(error), WRONG_INPUT)
    except KeyboardInterrupt:
        return told(command, "interrupted", INTERRUPTED)
    except Exception as error:
        from purlin_core.errors import PurlinError

        if isinstance(error.__cause__, InputError):  # a rank found it
            return told(command, str(error.__cause__), WRONG_INPUT)
        if not isinstance(error, PurlinError):
            raise
        return told(command, f"{type(error).__name__}: {error}", FAILED)


def told(command: str, text: str, code: int) -> int:
    say(f"{command}: {text}", sys.stderr)
    return code
