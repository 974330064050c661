class Job:
    """A function that runs every so many seconds. After too many failures in a row it is switched off."""

    def __init__(self, name, function, every, max_failures=3):
        self.name, self.function, self.every, self.max_failures = name, function, every, max_failures
        self.due, self.failures, self.enabled, self.last_error = 0, 0, True, None

    def delay(self):
        """Seconds to the next run: longer after each failure."""
        return self.every * 2 ** self.failures

    def succeeded(self, now):
        self.last_error = None
        self.due = now + self.delay()

    def failed(self, now, error):
        self.failures += 1
        self.last_error = error
        self.due = now + self.delay()
        if self.failures >= self.max_failures:
            self.enabled = False

    def enable(self, now):
        """Switch the job on again, due at once, as if it had never failed."""
        self.enabled = True
        self.last_error = None
        self.due = now
