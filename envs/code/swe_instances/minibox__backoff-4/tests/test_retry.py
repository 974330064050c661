from itertools import islice

from backoff import GaveUp, delays, retry


def failing(times):
    calls = []

    def call():
        calls.append(1)
        if len(calls) <= times:
            raise OSError("not yet")
        return len(calls)
    return call, calls


def test_the_first_success_is_returned():
    slept = []
    call, _ = failing(2)
    assert retry(call, sleep=slept.append) == 3
    assert slept == [0.5, 1.0]


def test_it_gives_up():
    call, _ = failing(100)
    try:
        retry(call, attempts=3, sleep=lambda seconds: None)
    except GaveUp as error:
        assert isinstance(error.__cause__, OSError)
    else:
        raise AssertionError("it did not give up")


def test_other_errors_pass():
    try:
        retry(lambda: 1 / 0)
    except ZeroDivisionError:
        return
    raise AssertionError("the error is lost")


def test_delays_grow():
    assert list(islice(delays(1, 3), 3)) == [1, 3, 9]
