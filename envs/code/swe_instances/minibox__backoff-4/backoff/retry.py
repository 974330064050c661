"""Call until it works."""

import time

from backoff.schedule import delays


class GaveUp(Exception):
    """Every attempt has failed; the last error is the cause."""


def retry(call, attempts=5, errors=(OSError,), pauses=None, sleep=time.sleep):
    """The result of the first call that works, of at most `attempts`."""
    pauses = delays() if pauses is None else iter(pauses)
    failures = 0
    while True:
        try:
            return call()
        except errors as error:
            failures += 1
            if failures > attempts:
                raise GaveUp(f"after {attempts} attempts") from error
            sleep(next(pauses))
