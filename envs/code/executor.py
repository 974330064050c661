"""Tests in a container somewhere else: a client of a service that runs commands over container images."""

from __future__ import annotations

import base64
import re
import time

from envs import BadInput
from envs.code import trees
from envs.code.sandbox import Result, SandboxError

PATIENCE = 30  # beyond the time that the command may take [s]


def check_trust(name: str, config, split: str) -> None:
    """BadInput where training would be on rewards that the code under test can forge: the local judge (values
    compared outside, a pipe that runs none of the code) is not there."""
    if split == "train" and config.executor_url and not config.trust_executor:
        raise BadInput(f"environment {name}: option executor_url: the code that is tested there can forge "
                       "its reward (docs/sandbox.md); it is for evaluations, or trust_executor=true")


def marks(config) -> dict[str, float]:
    """What the info of an episode says of its reward besides."""
    return {"unjudged": 1.0} if config.executor_url else {}


def warning(name: str, config) -> str:
    """A line for the start of a run. "": the sandbox judges"""
    if not config.executor_url:
        return ""
    return (f"warning: environment {name}: the tests run at executor_url, where the code that is tested can "
            "forge its reward (docs/sandbox.md)")


class HttpExecutor:
    """A service that runs a test command over a container image with some files laid over it.

    POST /test {docker_image, patch_tar_b64, test_cmd, timeout} -> {test_output, exit_code, elapsed_seconds,
    container_id}; GET /health and /ping. tools/executor_server.py is a small one.
    """

    def __init__(self, url: str, retries: int = 3):
        import requests  # takes a while, and only an executor needs it

        if not re.fullmatch(r"https?://[^/\s]+(/[^\s?#]*)?", url):
            raise BadInput(f"executor_url={url}: expected the form http://host:port")
        self.requests, self.url, self.retries = requests, url.rstrip("/"), retries

    def check(self) -> None:
        """BadInput unless the service says that it is well."""
        try:
            answer = self.requests.get(f"{self.url}/health", timeout=10)
        except self.requests.RequestException as error:
            raise BadInput(f"executor_url={self.url}: no answer from /health ({type(error).__name__}); is "
                           "the service running?") from error
        if not answer.ok:
            raise BadInput(f"executor_url={self.url}: /health answered {answer.status_code}: "
                           f"{' '.join(answer.text[:200].split())!r}, expected 200")

    def test(self, docker_image: str, files: dict, test_cmd: str, timeout: float = 300.0) -> Result:
        """Raises SandboxError when the service gives no answer, or none of the right form."""
        body = dict(docker_image=docker_image, patch_tar_b64=base64.b64encode(trees.tar(files)).decode(),
                    test_cmd=test_cmd, timeout=timeout)
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(0.5 * 2 ** (attempt - 1), 30.0))
            try:
                answer = self.requests.post(f"{self.url}/test", json=body, timeout=(10, timeout + PATIENCE))
            except self.requests.RequestException as error:
                reason = f"{type(error).__name__}"
                continue
            if answer.status_code == 429 or answer.status_code >= 500:
                reason = f"answered {answer.status_code}"
                continue
            try:
                data = answer.json() if answer.ok else {}
                code = int(data["exit_code"])
                return Result(str(data["test_output"]), code, float(data["elapsed_seconds"]), code == 124)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise SandboxError(f"{self.url}/test answered {answer.status_code}: {answer.text[:200]!r}, "
                                   "expected test_output, exit_code, elapsed_seconds") from error
        raise SandboxError(f"{self.url}/test {reason}, after {self.retries + 1} tries")
