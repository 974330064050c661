import pytest

from scheduler import Job, Runner
from scheduler.clock import Clock


class Flaky:
    """Fails where the script says F."""

    def __init__(self, script):
        self.script, self.calls = script, 0

    def __call__(self):
        letter = self.script[self.calls % len(self.script)]
        self.calls += 1
        if letter == "F":
            raise RuntimeError("no luck")


@pytest.fixture
def runner():
    return Runner(Clock())


def test_runs_when_due(runner):
    job = Flaky(".")
    runner.add(Job("a", job, every=10))
    runner.run_for(30)
    assert job.calls == 3


def test_order(runner):
    for name in "ba":
        runner.add(Job(name, Flaky("."), every=10))
    assert runner.tick() == ["b", "a"]


def test_same_name_twice(runner):
    runner.add(Job("a", Flaky("."), every=10))
    with pytest.raises(ValueError):
        runner.add(Job("a", Flaky("."), every=10))


def test_waits_longer_after_a_failure(runner):
    runner.add(Job("a", Flaky("F."), every=10))
    runner.tick()
    assert runner.jobs["a"].due == 20


def test_switched_off_after_failures_in_a_row(runner):
    runner.add(Job("a", Flaky("F"), every=1))
    runner.run_for(30)
    job = runner.jobs["a"]
    assert not job.enabled and job.function.calls == 3


def test_failures_now_and_then_are_fine(runner):
    runner.add(Job("a", Flaky("F.."), every=1))
    runner.run_for(60)
    assert runner.jobs["a"].enabled


def test_back_to_the_usual_pace(runner):
    runner.add(Job("a", Flaky("F."), every=10))
    runner.tick()
    runner.clock.advance(20)
    runner.tick()
    assert runner.jobs["a"].due == 30


def test_error_is_kept(runner):
    runner.add(Job("a", Flaky("F"), every=1))
    runner.tick()
    assert str(runner.jobs["a"].last_error) == "no luck"


def test_enable(runner):
    runner.add(Job("a", Flaky("F"), every=1))
    runner.run_for(30)
    runner.jobs["a"].enable(runner.clock.now())
    assert runner.tick() == ["a"]


def test_enable_gives_all_attempts_again(runner):
    runner.add(Job("a", Flaky("F"), every=1))
    runner.run_for(30)
    runner.jobs["a"].enable(runner.clock.now())
    runner.tick()
    assert runner.jobs["a"].enabled


def test_other_jobs_go_on(runner):
    good = Flaky(".")
    runner.add(Job("bad", Flaky("F"), every=1))
    runner.add(Job("good", good, every=1))
    runner.run_for(10)
    assert good.calls == 10
