"""Environments of other packages, one short file each. docs/environments.md says which command each needs."""

from __future__ import annotations

import importlib

from envs import BadInput, first_line


def package(name: str, env: str):
    """The module `name` of a package that environment `env` needs, or one line on how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(f"environment {env} needs the package {name.partition('.')[0]}: "
                       f"pip install -r requirements-envs.txt ({first_line(error)})") from error
