"""Each command of pages and docstrings runs, here in short or by a test that is named, or says why it cannot.

The fast tests parse the flags of all, and make the environments of training commands. The slow ones run a
command of each kind, one program with the same flags, in a folder of its own: with what it reads in place,
sizes cut, a tiny model where the page has one of the hub or of an earlier run, and --engine hf.
"""

import argparse
import ast
import functools
import glob
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import make_rom
import pytest
import tyro

import envs
from tests.run_folders import ROOT, TINY, command_line, fork, load_script, train, variants, write_jsonl
from tests.test_game_boy import boot
from tests.test_ways_in import write_files
from tools import make_goal
from tools.docs_tables import code_lines, pages

READING = ("docs/reading/grpo.py", "docs/reading/ppo.py")
SCRIPTS = ("grpo_llm.py", "ppo_llm.py", "sft.py", "a2c_vecenv.py", *READING)
# Run elsewhere: a file of CI or of tests, what stands there or the test, patterns of commands that it runs.
ELSEWHERE = {
    ".ci/run": {
        "set -euo pipefail": [".ci/run"],
        "pytest": ["*pytest*"],
        "ruff check .": ["ruff check ."],
        "pip install -r requirements.txt": ["pip install -r requirements.txt"],
        "pip install --require-hashes -r requirements.lock": ["pip install --require-hashes *"],
        "-r requirements-envs.txt": ["pip install -r requirements-envs.txt"],
        "gguf==0.19.0": [
            "pip install -r requirements.txt reasoning-gym==0.1.25 gguf==0.19.0",
            "pip install gguf==0.19.0",
        ],
        "wandb==0.31.0": ["pip install wandb*"],
        'python3 -m venv "$scratch/agents"': ["python3 -m venv .venv-agents"],
        'pip" install openai==3.57.0': [
            ".venv-agents/bin/pip install *",
            "pip install openai==3.57.0",
            "pip install 'pydantic-ai-slim[[]openai]==2.68.0'",
        ],
        'python3 -m venv "$scratch/openenv"': ["python3 -m venv .venv-openenv"],
        'pip" install openenv==0.10.0': [".venv-openenv/bin/pip install openenv==0.10.0"],
        '-m venv "$scratch/arc"': ["python3.12 -m venv .venv-arc"],
        'pip" install arc-agi==0.9.9 arcengine==0.9.3': [".venv-arc/bin/pip install *"],
        "bubblewrap": ["apt-get install bubblewrap"],
        "bash tools/make_vllm_cpu_env.sh": ["*make_vllm_cpu_env.sh*"],
        "sh benchmarks/make_trl_env.sh": ["*make_trl_env.sh*"],
        "sh benchmarks/make_sb3_env.sh": ["*make_sb3_env.sh*"],
        "tools/get_smollm2.py": ["python tools/get_smollm2.py"],
        'uv" run --quiet grpo_llm.py': ["uv run grpo_llm.py"],
    },
    ".ci/full": {"exec": [".ci/full"]},
    "requirements.txt": {
        "pyboy==2.8.1": ["pip install pyboy==2.8.1"],
        "open_spiel==2.0.2": ["pip install open_spiel==2.0.2"],
    },
    "tests/test_real_model.py": {
        "test_the_tool_says_what_it_can_not_do": ["python tools/get_smollm2.py --gguf *"],
    },
    "tests/test_variants.py": {
        "test_a_variant_applies_as_it_stands_and_is_short": ["patch *", "git apply*"],
    },
    "tests/test_arc_toolkit.py": {
        "test_our_environment_plays_their_server": [".venv-arc/bin/python -c *", "*game_ids=door-0001*"],
        "test_the_evaluation_records_a_game_of_their_server": ["*--game-id door-0001 *"],
    },
    "tests/test_arcagi3.py": {
        "test_the_server_as_a_program": ["python tools/arc_server.py *"],
        "test_run_arc_eval_plays_in_process_live_and_from_a_recording": [
            "python tools/run_arc_eval.py --game-id * --live --scripted",
        ],
    },
    "tests/test_sandbox.py": {
        "test_an_executor_runs_commands_over_a_snapshot": [
            "python tools/executor_server.py *",
            "sh -c test_cmd",
        ],
        "test_each_channel_works_where_nothing_confines_it": ["python tests/channels.py outside"],
        "test_sandboxes_tell_each_other_nothing_but_in_the_known_ways": ["* tests/channels.py sandboxes"],
    },
    "tests/test_repl.py": {
        "test_what_blocks_and_tools_print": ["python3 -I -c *"],
        "test_made_scenarios_are_solved_by_their_solution": ["python tools/make_scenarios.py *"],
    },
    "tests/test_openenv.py": {
        "test_a_script_trains_on_it": ["*--env openenv *"],
    },
    "tests/test_swe.py": {
        "test_instances_may_be_exported_unjudged": ["python grpo_llm.py --env swe *dataset=*"],
        "test_predictions_of_a_run": ["python tools/export_predictions.py --run *"],
        "test_predictions_of_replies": ["python tools/export_predictions.py --replies *"],
    },
    "tests/test_agent_clients.py": {
        "test_a_conversation_with_a_tool_is_one_segment": ["python tests/agent_programs.py *"],
        "test_the_pages_example_trains": [
            "python -m docs.agent.shop_env *",
            "python sft.py --env docs/agent/shop_env.py:Shop *",
            "*program=docs/agent/shop_openai.py:run *",
        ],
    },
    "tests/test_tools.py": {
        "test_wandb_mirrors_a_log_while_it_is_written_and_resumed": ["python tools/track_run.py *"],
    },
    "tests/test_watch_run.py": {
        "test_it_goes_on_until_it_is_interrupted": ["python tools/watch_run.py runs/grpo/RUN"],
    },
    "tests/test_golden.py": {
        "test_the_first_number_that_differs_is_named_with_both_values": [
            "python tools/compare_runs.py * --golden grpo",
        ],
        "test_the_command_makes_the_run_itself_and_golden_renews_the_log": [
            "python tools/compare_runs.py --golden",
            "python tools/golden.py*",
        ],
        "test_other_machines_log_the_same": ["python -m tests.moved_start *"],
    },
    "tests/test_docs.py": {
        "test_a_change_of_a_shared_function_is_copied_to_the_other_scripts": ["python tools/copy_shared.py"],
        "test_check_names_stale_pages_and_writing_mends_them": ["python tools/docs_tables.py*"],
    },
    "tests/test_diagnose.py": {
        "test_a_run_made_now_has_its_symptom_and_a_good_one_none": ["python tests/broken_runs.py *"],
    },
    "tests/test_a2c_runs.py": {
        "test_the_self_test_passes_and_says_so_as_json": ["python a2c_vecenv.py --self-test"],
    },
    "tests/test_a2c_distributed.py": {
        "test_the_result_does_not_depend_on_the_number_of_processes": [
            "torchrun --nproc_per_node=2 a2c_vecenv.py *",
        ],
    },
    "tests/test_distributed.py": {
        "test_two_processes_go_on_where_one_was_killed_and_torchrun_starts_them_again": [
            "torchrun --max-restarts N",
        ],
    },
    "tests/test_engines.py": {
        "test_with_vllm_each_sampled_token_has_the_trainers_logprob_and_a_resume_is_exact": [
            "python grpo_llm.py --engine vllm",
        ],
        "test_every_server_samples_with_the_policys_weights_in_every_iteration": [
            "python grpo_llm.py *--vllm-url *",
        ],
        "test_a_server_takes_weights_between_two_tokens_of_a_reply": ["python grpo_inflight.py *"],
        "test_a_real_server_that_is_killed": ["python -m vllm.entrypoints.openai.api_server *"],
    },
    "tests/test_overlap.py": {
        "test_without_staleness_all_is_as_in_grpo_llm": ["python grpo_overlap.py *"],
        "test_a_process_that_samples_ahead": ["python grpo_overlap_hf.py"],
        "test_a_reply_goes_on_with_new_weights_between_two_tokens": ["python grpo_inflight_hf.py"],
    },
    "tests/test_gpu.py": {
        "test_one_command_measures_all_parts_and_goes_on_where_it_was_stopped": [
            "python benchmarks/gpu.py *",
        ],
    },
    "tests/test_benchmarks.py": {
        "test_a_run_of_code_that_computes_otherwise_begins_anew": ["python benchmarks/refresh.py *"],
        "test_figures_are_made_once_and_go_on_where_they_stopped": ["python benchmarks/refresh.py"],
        "test_runs_of_losses_go_on_after_a_kill_and_end_once": [
            "python benchmarks/losses.py --stage rates *",
            "python benchmarks/losses.py --table",
        ],
        "test_the_table_of_a_real_model_has_each_evaluation_and_the_time_without_them": [
            "python benchmarks/smollm2.py --table",
        ],
    },
}
# Command, as a pattern: what it wants that no test has.
CANNOT = {
    "pip install -r requirements-vllm.txt": "gpu",
    "pip install flash-attn": "gpu",
    "vllm serve*": "gpu",
    "torchrun --nproc_per_node=8*": "gpu",
    "torchrun --nnodes=2 *": "gpu",
    "torchrun --shutdown-timeout 600": "gpu",
    "srun *": "gpu",
    "*--cudagraphs*": "gpu",
    "*--vllm-kwargs *": "gpu",
    "* --dataset OWNER/NAME *": "hub",
    "python tools/convert_sft.py --data OWNER/NAME *": "hub",
    "python -m nltk.downloader *": "network",
    "wandb login": "network",
    "uv pip compile *": "network",
    "python tools/run_arc_eval.py --game-id ls20-016295f7601e *": "network",
    "docker *": "other-package",  # Docker
    "pip install py-spy": "other-package",  # py-spy, here and below
    "py-spy dump *": "other-package",
    "python tests/mutants.py": "hours",
    "python tests/mutants.py grpo_llm.py": "hours",
    "python tests/mutants.py 'envs/*": "hours",
    "python tests/mutants.py --changed*": "hours",  # minutes, in no shorter form
    "python tests/mutants.py --matrix *": "hours",
    "python tests/mutants.py --trace": "hours",  # minutes
    "python benchmarks/losses.py --stage grid *": "hours",
    "python benchmarks/losses.py --stage knobs *": "hours",
    "python benchmarks/smollm2.py --jobs 2": "hours",
    "python benchmarks/sampler.py faults": "hours",
    "python benchmarks/a2c_vs_sb3.py cartpole": "hours",  # minutes, in no shorter form
    "python benchmarks/smollm2.py --only *": "hours",
    "python benchmarks/exercises.py": "hours",  # minutes
    "python benchmarks/exercises.py --only *": "hours",
    "python benchmarks/time_to.py *": "hours",  # a quarter of one for each seed
    "python benchmarks/iteration.py": "hours",  # minutes
    "python benchmarks/iteration.py --tricks": "hours",  # minutes
    "python benchmarks/iteration.py --tricks --real *": "hours",  # minutes
}
REASONS = ("gpu", "hub", "hours", "network", "other-package")
# What a package brings to an environment, and the name that it is imported by.
PACKAGES = {"--env reasoning-gym": "reasoning_gym", "--env textarena": "textarena",
            "--env verifiers": "verifiers", "ALE/": "ale_py", "a2c_vs_sb3.py atari": "ale_py"}
# Of the libraries that benchmarks compare with; CI makes them elsewhere.
PYTHONS = {name: os.environ.get(f"{name.upper()}_PYTHON", f"{ROOT}/.venv-{name}/bin/python")
           for name in ("trl", "sb3")}

PROGRAM = re.compile(
    r"(\$ )?([A-Z_]+=\S+ +)*(exec |taskset -c \d+ )*(\S+/)?"
    r"(python[0-9.]*|sh|bash|torchrun|pip|uv|pytest|ruff|vllm|docker|git|curl|patch|cp|srun|sbatch|apt-get|wandb|diff"
    r"|for|make_\w+\.sh|\.ci/(run|full))(?= |$)")
NO_COMMAND = re.compile(r"(diff --git a/|for \S+(, \S+)? in .*:$|for .*\)$)")
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
VALUES = {"$seed": "1", "$s": "1"}


class Command(NamedTuple):
    page: str
    line: str  # its words, what the shell does with them aside

    @property
    def words(self):
        return shlex.split(self.line)


def texts():
    """{path: text of a page, docstring of a program, or comment that a shell script begins with}"""
    found = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", ROOT / "tests/README.md"]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in found}
    for pattern in ("*.py", "tools/*", "benchmarks/*", "docs/reading/*.py", "envs/**/*.py", "tests/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            if path.suffix == ".py" and not re.match("envs/code/(repl_scenarios|swe_instances)/", name):
                start = re.match(r'(#.*\n|\s)*r?"""(?s:.*?)"""', path.read_text())  # all of it takes a second
                texts[name] = ast.get_docstring(ast.parse(start[0])) if start else ""
            elif path.suffix == ".sh":
                comment = re.match(r"(#.*\n)+", path.read_text())[0]
                texts[name] = re.sub("^# ?", "", comment, flags=re.MULTILINE)
    return texts


def simple_commands(line):
    """The commands of a line of the shell: without loops, comments, pipes, assignments and redirections."""
    line = re.sub(r" (> \S+|<<.*|\|\| \[.*)", " ", line).removeprefix("$ ")
    for name, value in VALUES.items():
        line = line.replace(name, value)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    words = []
    for word in [*lexer, ";"]:
        if not set(word) <= set(";|&"):
            words.append(word)
            continue
        while words and (words[0] in ("do", "done", "exec") or re.match(r"[A-Z_]+=", words[0])):
            words.pop(0)
        if words[:2] == ["taskset", "-c"]:
            words = words[3:]
        if words and words[0] != "for":
            yield shlex.join(words)
        words = []


def commands_of(page, text):
    pending = ""
    spans = [*code_lines(text)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans += ["", *(" ".join(span.split()) for span in INLINE.findall(prose) if " " in span or ".sh" in span)]
    for line in spans:
        line = line if pending else line.strip()
        if not pending and (not PROGRAM.match(line) or NO_COMMAND.match(line)):
            continue
        line = pending + line
        try:
            found = [*simple_commands(line)]
        except ValueError:  # a quotation that goes on
            pending = line + "\n"
            continue
        pending = ""
        yield from (Command(page, command) for command in found)


def commands():
    return [command for page, text in texts().items() for command in commands_of(page, text)]


@functools.cache
def unique():
    """{line of a command: its first page}"""
    return {command.line: command.page for command in reversed(commands())}


def places():
    """(pattern, file, what stands there or the name of a test)"""
    return [(pattern, path, name) for path, names in ELSEWHERE.items()
            for name, patterns in names.items() for pattern in patterns]


def classes(line):
    """Why it is not run here: the places that do, the reasons why none can."""
    found = [f"{path}: {name}" for pattern, path, name in places() if fnmatchcase(line, pattern)]
    return found + [reason for pattern, reason in CANNOT.items() if fnmatchcase(line, pattern)]


def script_of(line):
    """The script that python or torchrun starts, or nothing; and its flags."""
    words = shlex.split(line)
    found = [number for number, word in enumerate(words) if word.endswith(".py")]
    if not found or not re.search(r"(^|/)(python[0-9.]*|torchrun)$", words[0]) or words[1] in ("-m", "-c"):
        return "", []
    return words[found[0]], words[found[0] + 1:]


def located(script):
    return variants().get(script, ROOT / script)


def takes_args(script):
    """Whether it is a training script, with a class Args for tyro."""
    return script in SCRIPTS or script in variants()


# Fast: what there is, and its flags


def test_every_command_is_run_here_or_elsewhere_or_cannot_be():
    wrong = [f"{page}: {line}" for line, page in unique().items()
             if len(set(classes(line))) + runs_here(line) != 1]
    assert wrong == [], "name it in ELSEWHERE, CANNOT or SHORT, and not in two of them"


def test_the_lists_name_commands_that_pages_have_and_tests_that_there_are():
    patterns = [*(pattern for pattern, *_ in places()), *CANNOT, *SHORT]
    assert [pattern for pattern in patterns
            if not any(fnmatchcase(line, pattern) for line in unique())] == []
    assert set(CANNOT.values()) == set(REASONS)
    for _, path, name in places():
        text = f"\ndef {name}(" if path.startswith("tests/") else name
        assert text in (ROOT / path).read_text(), f"{path} has no {name}"


class Parsed(BaseException):
    """Instead of a program's work."""


def parse(script, flags):
    """As the script does it. -> Args of a training script"""
    path = located(script)
    assert path.is_file(), f"there is no {script}"
    if takes_args(script):
        return tyro.cli(module_of(path).Args, args=flags)
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_end(parser, argv=None, namespace=None):
        parse_args(parser, flags, namespace)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.setattr("sides.check_environment", lambda *packages, **of: None)
        with pytest.raises(Parsed):
            command_line(path, *flags)


@functools.cache
def module_of(path):
    """A script's module: that of the test where it is one of the four."""
    if path.parent == ROOT:
        return importlib.import_module(path.stem)
    return load_script(path)


PARSED = {page: [line for line, at in unique().items() if at == page and script_of(line)[0]]
          for page in dict.fromkeys(unique().values())}


@pytest.mark.parametrize("page", [page for page, lines in PARSED.items() if lines])
def test_flags_are_the_programs(page, files, monkeypatch, capsys):
    monkeypatch.chdir(files)  # where nothing is written, since nothing runs
    for line in PARSED[page]:
        script, flags = script_of(line)
        source = located(script).read_text()
        if flags == ["--help"] or not (takes_args(script) or "import argparse" in source):
            continue
        try:
            args = parse(script, flags)
        except SystemExit as end:
            raise AssertionError(f"{line}: {end} {capsys.readouterr().err}") from end
        if args and hasattr(args, "env") and has_packages(line) and not classes(line):
            kind = type(args)  # sft.py's own options are of its own environment
            is_other = args.env != kind.env and args.env_kwargs == kind.env_kwargs
            envs.make(args.env, **envs.parse_options(() if is_other else args.env_kwargs))


def has_packages(line):
    """Whether the packages are there that the line's environment needs, and the other side of a benchmark."""
    return (all(importlib.util.find_spec(package) for name, package in PACKAGES.items() if name in line)
            and all(Path(python).exists() for name, python in PYTHONS.items() if f"_vs_{name}.py" in line))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the commands read, but for runs."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    # Copies, since commands write into them; but for models, of which there is more than a little.
    for name in ("envs", "tests", "benchmarks", "docs/results", "docs/rewards", "docs/variants",
                 "docs/reading/exercises"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "models").mkdir()
    for path in (ROOT / "models").iterdir():
        (folder / "models" / path.name).symlink_to(path)
    for name in ("docs/figures", "data", "goals", "look"):
        (folder / name).mkdir(parents=True)
    for name in ("grpo", "ppo"):  # `diff grpo.py ppo.py`
        shutil.copy(ROOT / "docs/reading" / f"{name}.py", folder)
    for name in ("grpo_llm.py", "ppo_llm.py", "grpo_curriculum.py", *READING):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(located(name), folder / name)
    write_jsonl(folder / "train.jsonl", [
        dict(question=f"What is {n} + 1?", answer=str(n + 1), hint=str(n),
             prompt=[dict(role="user", content=f"What is {n} + 1?")]) for n in range(30)])
    chat = [dict(instance_id=f"chat-{n}", messages=[
        dict(role="user", content=f"{n}?"), dict(role="assistant", content=f"{n + 1}.")]) for n in range(40)]
    pairs = [dict(prompt=row["messages"][:1], response=row["messages"][1]["content"]) for row in chat]
    import pandas
    halves = dict(train=pairs[:20], val=pairs[20:])  # no prompt is learned and held out
    for name, rows in dict(chats=chat[:20], **{f"data/{name}_{part}": halves[part] for part in halves
                                               for name in ("chats", "agent")}).items():
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    write_jsonl(folder / "more.jsonl", chat[:20])
    write_jsonl(folder / "held_out.jsonl", chat[20:])
    write_jsonl(folder / "rows.jsonl", pairs)
    (folder / "path/to/tests").mkdir(parents=True)
    (folder / "path/to/tests/test_one.py").write_text("def test_one():\n    assert 1 + 1 == 2\n")
    shutil.copy(ROOT / "grpo_llm.py", folder / "grpo_mine.py")
    (folder / "scenarios").symlink_to(ROOT / "envs/code/repl_scenarios")
    shutil.copy(ROOT / "docs/results/grpo_llm.csv", folder / "grpo.csv")
    shutil.copy(ROOT / "envs/arcagi3/session.json", folder / "look/session.jsonl")
    (folder / "way.txt").write_text("B UP*3 A RIGHT DOWN")
    (folder / "game.gb").write_bytes(make_rom.rom())
    return folder


@pytest.fixture
def workspace(files, tmp_path, monkeypatch):
    folder = shutil.copytree(files, tmp_path / "it", symlinks=True, copy_function=os.link)
    monkeypatch.chdir(folder)
    return folder


# Slow: one of each kind


SIZES = dict(iterations=2, steps=2, group_size=2, batch_size=2, eval_tasks=2, eval_samples=2, max_turns=2,
             critic_warmup=1, max_response_tokens=6, num_envs=8, num_steps=4, eval_envs=2,
             eval_episodes=2, chunk=16)
FREE = ("--seed", "--run-dir", "--title", "--out", "--csv", "--png", "--label", "--control-label", "--panel",
        "--smoothing", "--x")
OF_SIZE = ("--repeats", "--iterations", "--script", "--tokens", "--width", "--steps", "--vllm-python",
           "--jobs", "--profile", "--engines", "--engine")
# Modes of benchmarks that run the same code as another.
SAME = {"real": "step"}
# What makes a program short: the first pattern that a command matches.
SHORT = {
    "python tools/run_arc_eval.py *--tasks *": "--tasks 2",
    "python tools/*": "",
    "python tests/make_rom.py *": "",
    "python tests/mutants.py --list": "",
    "python benchmarks/a2c_vs_sb3.py *": "--repeats 1 --steps 1024 --networks small --dtypes float32 "
        "--sizes 8x4 --sides sb3,ours --sb3-python {sb3}",
    "python benchmarks/grpo_vs_trl.py run*": "--iterations 2 --block 1 --repeats 1 --sides ours,trl "
        "--trl-python {trl}",
    "python benchmarks/grpo_vs_trl.py *": "--sizes 2x2x4 --repeats 1 --trl-python {trl}",
    "python benchmarks/sft_vs_trl.py *": "--sides ours,trl --repeats 1 --trl-python {trl}",
    "python benchmarks/agent.py*": "--prompts 8 --repeats 1",
    "python benchmarks/exercises.py --table": "",
    "python benchmarks/exercises.py --plot": "",
    "python benchmarks/logic.py *": "--tasks 10",
    "python benchmarks/losses.py *": "",
    "python benchmarks/openspiel.py*": "--cases tic_tac_toe --seconds 0.05",
    "python benchmarks/overlap.py*": "--engine hf --iterations 4 --repeats 1",
    "python benchmarks/pixel_goal.py *": "--repeats 1",
    "python benchmarks/ppo_vs_a2c.py*": "--list",
    "python benchmarks/rollout.py*": "--repeats 1",
    "python benchmarks/sampler.py table": "",
    "python benchmarks/sampler.py *": "--only tiny_1x2x4_full_1 --engine hf",
    "python benchmarks/scaling.py*": "--repeats 1 --iterations 4",
    "python benchmarks/smollm2.py *": "",
    "python benchmarks/update_memory.py *--model *": "--repeats 0 --model Qwen2.5-0.5B",
    "python benchmarks/update_memory.py*": "--tokens 256",
}


def kind(line):
    """Commands of one kind differ in values, not in flags or environments."""
    script, flags = script_of(line)
    if "--flags" in flags:  # of another script
        flags = flags[:flags.index("--flags")]
    free = FREE + OF_SIZE * script.startswith("benchmarks")
    names = frozenset(word for word in flags if word.startswith("--") and word not in free)
    env = re.search(r"--(env|env-id) (\S+)", line)
    options = re.search(r"--env-kwargs ([^-]*)", line)
    mode = ""
    if script.startswith("benchmarks") and flags and not flags[0].startswith("-"):
        mode = SAME.get(flags[0], flags[0])
    return script or line, names, env and env[2], options and len(options[1].split()), mode


def runs_here(line):
    if classes(line):
        return False
    if script_of(line)[0]:
        return takes_args(script_of(line)[0]) or any(fnmatchcase(line, pattern) for pattern in SHORT)
    return line.startswith(("cp ", "diff ", "python -c "))


def plainness(line):
    return bool(set(SAME) & set(line.split())), len(line)


# Of each kind the plainest.
RUN_HERE = list({kind(line): line for line in sorted(unique(), key=plainness, reverse=True)
                 if runs_here(line)}.values())


@pytest.fixture(scope="module")
def runs(files, tmp_path_factory):
    """{name: run folder}; and a game with a goal, among the files"""
    folder = tmp_path_factory.mktemp("runs")
    for script, name, flags in (
            ("grpo_llm", "grpo", dict(log_episodes=1.0)), ("grpo_llm", "lora", dict(lora_rank=2)),
            ("sft", "sft", {}), ("a2c_vecenv", "a2c", {}), ("ppo_llm", "ppo", {}),
            ("a2c_vecenv", "pong", dict(env_id="CartPole-v1")),
            ("grpo_llm", "rows", dict(model=f"{files}/tiny", env="rows", env_kwargs=(
                f"data={files}/train.jsonl", "prompt=question", "answer=answer", "check=number")))):
        train(importlib.import_module(script), folder / name, **flags)
    found = {path.name: path for path in folder.iterdir()}
    boy = boot(files)
    boy.tick(300, False, False)
    with open(files / "start.state", "wb") as file:
        boy.save_state(file)
    options = [f"rom={files}/game.gb", f"state={files}/start.state", DIM]
    assert make_goal.main(["--env-id", "pyboy", "--env-kwargs", *options, "--actions", "A RIGHT",
                           "--out", f"{files}/goals/mine"]) == 0
    return found


DIM = "tau=0.001"  # tests/make_rom.py's pictures differ in little
# Parts of a path, and the run that is put there.
OF_PATH = {"pong": "pong", "a2c": "a2c", "sft": "sft", "ppo": "ppo", "rows": "rows"}
WRITTEN = ("--run-dir", "--out", "--csv", "--output-dir", "--runs")


def put_runs(script, words, folder, runs):
    """Where a command reads a run or a checkpoint, it finds one."""
    name_of_run = r"train_log.jsonl|runs/.+|RUN\d?|[ABSG]\d|SFT\d|DIR|PATH"
    for before, word in zip(["", *words], words, strict=False):
        path = re.fullmatch(rf"({name_of_run})(/checkpoints/step_\d+)?|checkpoints/step_\d+", word)
        if not path or before in WRITTEN or before == "--model" and takes_args(script):
            continue
        name = next((name for part, name in OF_PATH.items() if part in word), "grpo")
        name = {"tools/merge_adapter.py": "lora", "tools/dump_policy_gif.py": "a2c"}.get(script, name)
        run = runs[name]
        target = folder / word.replace("*", "A")
        if word == "train_log.jsonl":
            run = run / word
        if "checkpoints" in word or word == "DIR":
            run = next((run / "checkpoints").glob("step_000004"))
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(run)


def shortened(line, folder):
    """-> the script's path and flags"""
    script, flags = script_of(line.replace("rom=game.gb", f"rom=game.gb {DIM}"))
    if flags == ["--help"]:
        return script, flags
    if not takes_args(script):
        model = TINY if "merge_adapter" in script else "tiny"
        flags = [model if before in ("--model", "--base-model") and "benchmarks" not in script else word
                 for before, word in zip(["", *flags], flags, strict=False)]
        more = next(words for pattern, words in SHORT.items() if fnmatchcase(line, pattern))
        more = more.format(**PYTHONS).split()
        at = flags.index("--flags") if "--flags" in flags else len(flags)
        flags = [word for given in flags for word in (glob.glob(given) or [given])]
        return script, [*flags[:at], *more, *flags[at:]]
    args = parse(script, flags)
    more = dict(run_dir="run")
    smallest = max(2, getattr(args, "minibatches", 0), getattr(args, "critic_minibatches", 0))
    for name, value in (SIZES | dict(prompts_per_iteration=smallest)).items():
        if getattr(args, name, 0) > value:
            more[name] = value
    if getattr(args, "teacher", ""):
        more["teacher"] = TINY
    model = getattr(args, "model", "")
    if model and not (folder / model / "config.json").exists():
        more |= dict(model="tiny", max_length=8192) if hasattr(args, "max_length") else dict(
            model="tiny", max_context_tokens=32768)
    if getattr(args, "engine", "hf") == "vllm":
        more["engine"] = "hf"
    return script, [*flags, *(word for name, value in more.items()
                              for word in (f"--{name.replace('_', '-')}", str(value)))]


CASES = [pytest.param(line, id=f"{unique()[line]}-{script_of(line)[0]}",
                      marks=[pytest.mark.release] * line.startswith("python benchmarks"))
         for line in RUN_HERE]


@pytest.mark.slow
@pytest.mark.parametrize("line", CASES)
def test_a_command_runs(line, runs, workspace, tmp_path):
    if not has_packages(line) and "CI" not in os.environ:
        pytest.skip("a package of its environment is not installed")
    if not shutil.which("bwrap") and "CI" not in os.environ and re.search("env (repl|swe)|sandbox", line):
        pytest.skip("bubblewrap is not installed")
    script, flags = script_of(line)
    if not script:
        words = shlex.split(line)
        for run in re.findall(r"runs/[\w/]+(?=/episodes)", line):
            put_runs("", [run], workspace, runs)
        code = subprocess.run([sys.executable if words[0] == "python" else words[0], *words[1:]],
                              env=os.environ | dict(PYTHONPATH=str(ROOT))).returncode
        assert code <= (words[0] == "diff")
        return
    for before, word in zip(["", *flags], flags, strict=False):
        if before in ("--out", "--output-dir") and (workspace / word).exists():
            path = workspace / word
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
    put_runs(script, flags, workspace, runs)
    script, flags = shortened(line, workspace)
    run = fork(tmp_path / "said.txt", located(script), *flags, folder=workspace, daemon=False)
    run.join(300)
    run.kill()
    assert run.exitcode == 0, (tmp_path / "said.txt").read_text()[-5000:]
