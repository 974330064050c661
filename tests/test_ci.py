"""CI begins as a newcomer does."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_ci_runs_the_commands_of_the_readme_to_the_letter_before_anything_else():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^    (pip install -r requirements\.txt && .+)$", readme, re.M)
    assert [command.split("&& ")[1] for command in commands] == ["python grpo_llm.py", "pytest"]
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    places = [lines.index(command) for command in commands]
    assert places == sorted(places)
    for number in places:  # each in an environment of its own, in which nothing was installed
        before = next(i for i in range(number, -1, -1) if lines[i].startswith("python3 -m venv"))
        assert not any("install" in line for line in lines[before:number])
    others = [i for i, line in enumerate(lines) if re.search(r"\b(pip|apt-get)\b.* install\b", line)]
    assert min(set(others) - set(places)) > max(places)
