"""The main command and a few fast tests on machines that this one is not, as far as one can pretend.

Each gets a copy of the checkout without .git, in a folder whose name has spaces and accents, and starts in
another one. OTHER_PYTHON names another Python, in whose environment requirements.txt is installed.
"""

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest

from tests.run_folders import ROOT

# What a machine does to a shell before it runs RUN. $AT is a folder that anyone may write into.
NOBODY = "--reuid 54321 --regid 54321 --clear-groups"  # a user without a name, to whom nothing here belongs
# All that root may read: the Python that runs this may lie in root's own folder.
READS = "--inh-caps +dac_read_search --ambient-caps +dac_read_search"
MACHINES = {
    "no AVX": "export ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE",
    "AVX2": "export ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2",
    "one core": "taskset --cpu-list --pid $(taskset --cpu-list --pid $$ | grep -Eo '[0-9]+$') $$",
    "eight threads": "export OMP_NUM_THREADS=8",
    "a user who may only read": f"export HOME=/; START='setpriv {NOBODY} {READS}'",
    "no HOME, no git, no bubblewrap": "unset HOME; PATH=$AT/programs",
    # In its own place: tokenizers reads no file whose name is not text in the locale.
    "ASCII": f"export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 CHECKOUT='{ROOT}'",
    "another Python": "PYTHON=$OTHER_PYTHON",
    "umask 077, 256 open files, a day ahead": "umask 077; ulimit -n 256; export TZ=Pacific/Kiritimati",
}
RUN = """
unset CI HF_HOME USER LOGNAME
export TMPDIR=$AT
cd "$AT"
$START $PYTHON "$CHECKOUT/grpo_llm.py" --iterations 3 --eval-tasks 8 --run-dir "$AT/run" &&
    $START $PYTHON "$CHECKOUT/tools/validate_train_log.py" --strict "$AT/run" &&
    $START $PYTHON -m pytest -n 0 -p no:cacheprovider --rootdir "$CHECKOUT" -c "$CHECKOUT/pyproject.toml" \
        "$CHECKOUT"/tests/test_{rl_maths,a2c_runs,rows,openspiel,game_boy,watch_run,view_episodes}.py
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    left_out = shutil.ignore_patterns(".git", "runs", ".venv*", "venv", "__pycache__", "smollm2*")
    folder = tmp_path_factory.mktemp("machines") / "Zoë's Überlegungen (2)"
    return shutil.copytree(ROOT, folder, ignore=left_out)


def on(machine, run, checkout, at):
    """-> exit code and output of a script of the shell"""
    at.chmod(0o777)
    known = dict(AT=str(at), CHECKOUT=str(checkout), PYTHON=sys.executable)
    done = subprocess.run(["bash", "-c", f"{machine}\n{run}"], env=os.environ | known, text=True,
                          encoding="utf-8", errors="replace", stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=600)
    return done.returncode, done.stdout


QUICK = ("no AVX", "a user who may only read", "ASCII", "another Python")  # the others are for a release


@pytest.mark.slow
@pytest.mark.parametrize("machine", [
    pytest.param(machine, marks=[pytest.mark.release] * (machine not in QUICK)) for machine in MACHINES])
def test_the_main_command_and_tests_pass(machine, checkout, tmp_path):
    if "setpriv" in MACHINES[machine] and os.geteuid():
        pytest.skip("only root becomes another user")
    if "$OTHER_PYTHON" in MACHINES[machine] and "OTHER_PYTHON" not in os.environ:
        pytest.skip("no OTHER_PYTHON, with the packages of requirements.txt")
    if "programs" in MACHINES[machine]:
        (tmp_path / "programs").mkdir()
        for program in map(shutil.which, ("bash", "sh", "uname", "patch", "true")):
            (tmp_path / "programs" / os.path.basename(program)).symlink_to(program)
    code, said = on(MACHINES[machine], RUN, checkout, tmp_path)
    assert code == 0 and not re.search(r"\d skipped", said), said[-5000:]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() > 0, reason="only root hides /proc")
def test_without_proc_a_script_ends_in_one_line(checkout, tmp_path):
    run = 'mount -t tmpfs none /proc && $PYTHON "$CHECKOUT/grpo_llm.py" --run-dir "$AT/run"'
    code, said = on("", f"unshare --mount bash -c '{run}'", checkout, tmp_path)
    assert code == 1 and not (tmp_path / "run").exists()
    assert [line for line in said.splitlines() if "cpuinfo" not in line] == [
        "error: /proc is not mounted, which tells the memory of a process: mount -t proc proc /proc"]


@pytest.mark.parametrize("script", ("grpo_llm", "ppo_llm", "sft", "a2c_vecenv"))
def test_on_windows_a_script_ends_in_one_line(script, monkeypatch):
    importlib.import_module(script)  # what it imports is there then, as it is for this system
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "fcntl", None)  # ImportError
    monkeypatch.delitem(sys.modules, "envs")
    with pytest.raises(SystemExit, match="^error: Windows is not supported: use its Linux .WSL 2.$"):
        runpy.run_path(str(ROOT / f"{script}.py"))
