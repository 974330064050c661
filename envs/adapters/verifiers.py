"""Tasks of one reply from a taskset of verifiers (its v1 API), scored by verifiers: docs/verifiers.md."""

import dataclasses
import inspect
import json
import math

from envs import Step, as_bad_input, final_part, hint, load_object
from envs.adapters import Listed, in_a_loop, package


@dataclasses.dataclass(frozen=True)
class Config:
    taskset: str
    """the taskset: path/to/file.py:Name of its class, or the id of an installed one"""
    options: str = "{}"
    """the taskset's own options, as a JSON object"""
    tasks: int = 10_000
    """tasks that are read, at most: a taskset may have no end"""
    correct: str = ""
    """reward whose score is 1 or more where a reply is correct; empty: the sum of all, with their weights"""
    timeout: float = 60.0
    """longest wait for the rewards of a reply [s]"""


class Verifiers(Listed):
    Config = Config
    blocking = True  # rewards may wait

    def __init__(self, config: Config):
        super().__init__(config)
        load = package("verifiers.v1.utils.loaders", "verifiers")  # takes 10 s
        name = "" if ".py:" in config.taskset else config.taskset
        with as_bad_input(f"environment verifiers: option taskset={config.taskset}"):
            cls = load.taskset_class(name) if name else load_object(config.taskset, "")
            kind = load.concrete_type(cls, load.TasksetConfig, origin=load.Taskset) or load.TasksetConfig
            with as_bad_input(f"option options: expected some of {', '.join(kind.model_fields)}"):
                taskset = cls(kind.model_validate({"id": name} | json.loads(config.options)))
            for task in taskset.take(config.tasks):
                if unfit := needs(load, taskset, task):
                    raise ValueError(f"task {task.data.idx} needs {unfit}: not supported")
                self.add(messages(task.data), task)
            names = sorted({hook.__name__ for task in self.listed.values() for hook in task.hooks("reward")})
            if (correct := config.correct) not in ("", *names):
                raise ValueError(f"no reward {correct!r}{hint(correct, names)}; known: {', '.join(names)}")
        self.source = f"verifiers/{name.rpartition('/')[2] or cls.__name__}"

    def score(self, task, reply: str) -> Step:
        """verifiers' own verdict. Where a reward raises, a reply is worth nothing."""
        vf, raised = package("verifiers.v1", "verifiers"), 0.0
        text = final_part(reply).encode(errors="replace").decode()  # pydantic takes no lone surrogates
        said = [*messages(task.data), {"role": "assistant", "content": text}]
        nodes = [vf.MessageNode(parent=k - 1 if k else None, message=one) for k, one in enumerate(said)]
        nodes[-1].sampled = True
        trace = vf.Trace(nodes=nodes, agent=vf.AgentInfo(config=vf.AgentConfig()), task=vf.TraceTask(
            type=type(task).__name__, data=task.data, hash=task.hash, key=task.key))
        trace.state = package("verifiers.v1.state", "verifiers").state_cls(type(task))()
        trace.stop("agent_completed")
        try:
            in_a_loop(task.score(trace), self.config.timeout)
        except TimeoutError:
            return Step([], 0.0, False, True, {"correct": 0.0, "error": 1.0})
        except Exception:
            raised = 1.0
        reward = trace.reward if math.isfinite(trace.reward) else 0.0
        scores = {name: one.score for name, one in trace.rewards.items() if one and math.isfinite(one.score)}
        solved = float((scores.get(self.config.correct, 0.0) if self.config.correct else reward) >= 1)
        return Step([], reward, True, False, scores | {"correct": solved, "raised": raised, "error": 0.0})


def messages(data) -> list[dict]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str | None):
        return [*system, {"role": "user", "content": data.prompt}]
    return system + [message.model_dump(include={"role", "content"}) for message in data.prompt]


def needs(load, taskset, task) -> str:
    """What a task needs beyond one reply and its text ('': nothing)."""
    kind, data, hooks = type(task), task.data, [*task.hooks("reward"), *task.hooks("metric")]
    takers = [hook.__name__ for hook in hooks if "runtime" in inspect.signature(hook).parameters]
    takers += [name for name in ("setup", "finalize") if getattr(kind, name) is not getattr(load.Task, name)]
    return ", ".join(what for what, found in {
        f"a runtime (for {', '.join(takers)})": takers, "a judge": task.config.judges,
        "a container": kind.NEEDS_CONTAINER or data.image, "skills or files": data.skills or data.artifacts,
        "tools": kind.toolsets(task.config) or taskset.toolsets(taskset.config),
        "an Env of its own": load.environment_class(taskset.config.id) is not load.SingleAgentEnv,
        "a reward": not task.hooks("reward"), "a prompt of texts": not all(
            one["role"] != "tool" and isinstance(one["content"], str) for one in messages(data)),
    }.items() if found)
