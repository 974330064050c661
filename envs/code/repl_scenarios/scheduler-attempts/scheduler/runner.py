class Runner:
    def __init__(self, clock):
        self.clock, self.jobs, self.log = clock, {}, []

    def add(self, job):
        if job.name in self.jobs:
            raise ValueError(f"there is a job {job.name}")
        job.due = self.clock.now()
        self.jobs[job.name] = job

    def tick(self):
        """Run all jobs that are due, in the order in which they were added. -> their names"""
        ran = []
        for job in self.jobs.values():
            if not job.enabled or job.due > self.clock.now():
                continue
            ran.append(job.name)
            try:
                job.function()
            except Exception as error:
                job.failed(self.clock.now(), error)
                self.log.append((job.name, "failed"))
            else:
                job.succeeded(self.clock.now())
                self.log.append((job.name, "ok"))
        return ran

    def run_for(self, seconds, step=1):
        for _ in range(0, seconds, step):
            self.tick()
            self.clock.advance(step)
