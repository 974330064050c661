from scheduler.job import Job
from scheduler.runner import Runner

__all__ = ["Job", "Runner"]
