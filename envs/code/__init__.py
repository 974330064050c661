"""Environments in which a model's code runs: bugs fixed through a REPL (repl), issues of repositories (swe).

Both judge by tests (testing) that run in a sandbox (sandbox), whose bundled repositories lie beside them.
"""
