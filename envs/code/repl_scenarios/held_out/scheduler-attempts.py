import pytest

from scheduler import Job, Runner
from scheduler.clock import Clock


def scripted(text):
    """A function that fails where the text has an x, and the list of its calls."""
    calls = []

    def function():
        calls.append(text[len(calls) % len(text)])
        if calls[-1] == "x":
            raise OSError(f"call {len(calls)}")
    return function, calls


def started(text, **options):
    function, calls = scripted(text)
    runner = Runner(Clock(100))
    runner.add(Job("j", function, **options))
    return runner, runner.jobs["j"], calls


def test_each_time_it_is_due():
    runner, _, calls = started("o", every=5)
    runner.run_for(20)
    assert len(calls) == 4


def test_a_wait_that_doubles():
    runner, job, _ = started("xx", every=6, max_failures=9)
    runner.tick()
    assert job.due == 112
    runner.clock.advance(12)
    runner.tick()
    assert job.due == 136


def test_off_after_as_many_as_allowed():
    runner, job, calls = started("x", every=1, max_failures=2)
    runner.run_for(40)
    assert len(calls) == 2 and not job.enabled


def test_failures_that_are_not_in_a_row():
    runner, job, calls = started("xxo", every=1)
    runner.run_for(90)
    assert (job.enabled, len(calls)) == (True, 38)


def test_the_usual_wait_after_a_success():
    runner, job, _ = started("xxo", every=4)
    for seconds in (8, 16):
        runner.tick()
        runner.clock.advance(seconds)
    runner.tick()
    assert (job.due - runner.clock.now(), job.failures) == (4, 0)


def test_what_went_wrong():
    runner, job, _ = started("xo", every=1)
    runner.tick()
    assert str(job.last_error) == "call 1"
    runner.run_for(3)
    assert job.last_error is None


def test_on_again():
    runner, job, calls = started("x", every=1)
    runner.run_for(50)
    job.enable(runner.clock.now())
    assert job.enabled and runner.tick() == ["j"] and len(calls) == 4


def test_on_again_with_all_attempts():
    runner, job, calls = started("x", every=1)
    runner.run_for(50)
    job.enable(runner.clock.now())
    runner.run_for(50)
    assert (len(calls), calls, job.enabled) == (6, ["x"] * 6, False)


def test_on_again_with_the_usual_wait():
    runner, job, _ = started("xxxo", every=10)
    runner.run_for(200)
    job.enable(runner.clock.now())
    runner.tick()
    assert (job.due - runner.clock.now(), runner.clock.now()) == (10, 300)


def test_what_happened():
    runner, _, _ = started("ox", every=3)
    runner.run_for(6)
    assert runner.log == [("j", "ok"), ("j", "failed")]


def test_names_are_taken_once():
    runner, job, _ = started("o", every=3)
    with pytest.raises(ValueError):
        runner.add(job)
