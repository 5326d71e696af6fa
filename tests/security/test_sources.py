"""What the package's own source does not do: unpickle, run text, call a shell, open a server."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "gspo"

#: Modules that run what they read, start servers, or both.
MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle",
    "http.server", "socketserver", "xmlrpc", "wsgiref", "flask", "fastapi", "uvicorn", "aiohttp", "telnetlib", "pty",
}  # fmt: skip
BUILTINS = {"eval", "exec", "__import__"}
CALLS = {
    "torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen", "np.load", "numpy.load", "socket.socket",
    "socket.create_server", "asyncio.start_server", "pd.read_pickle", "pandas.read_pickle", "torch.hub.load",
}  # fmt: skip

#: (file, what) that is there on purpose, and why.
ALLOWED = {
    ("sandbox/guest/call.py", "exec"): "a candidate's program, inside the box",
    ("sandbox/guest/harness.py", "exec"): "a candidate's program, inside the box",
    ("data/sets/programs.py", "exec"): "our own generators and solutions, shipped with the package",
    ("cli/conformance/hanging.py", "pickle"): "only asks whether a function could be pickled; reads none",
}


def uses(tree: ast.AST) -> Iterator[str]:
    """Everything of the lists above that a module does."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (module for module in MODULES for name in names if name == module or name.startswith(f"{module}."))
        if isinstance(node, ast.Call):
            yield from call_faults(node)


def call_faults(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if called in BUILTINS:
        yield called
    if called in CALLS and not is_true(keywords.get("weights_only")):
        yield called
    yield from (name for name in ("shell", "allow_pickle", "trust_remote_code") if is_true(keywords.get(name)))
    if called.rpartition(".")[2] in ("listen", "serve_forever"):
        yield called


def is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def found() -> set[tuple[str, str]]:
    return {
        (path.relative_to(SOURCE).as_posix(), use)
        for path in SOURCE.rglob("*.py")
        for use in uses(ast.parse(path.read_text(encoding="utf-8")))
    }


def test_nothing_unpickles_runs_text_or_serves() -> None:
    assert sorted(found() - ALLOWED.keys()) == []


def test_the_list_of_exceptions_is_no_longer_than_needed() -> None:
    assert sorted(ALLOWED.keys() - found()) == []


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import http.server as s", "http.server"),
        ("from http import server", "http.server"),
        ("eval('1')", "eval"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("subprocess.run(text, shell=True)", "shell"),
        ("load(path, trust_remote_code=True)", "trust_remote_code"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("server.listen(5)", "server.listen"),
    ],
)
def test_the_scan_sees(text: str, use: str) -> None:
    assert use in set(uses(ast.parse(text)))


@pytest.mark.parametrize("text", ["model.eval()", "torch.load(p, weights_only=True)", "run(words, shell=False)"])
def test_the_scan_leaves_alone(text: str) -> None:
    assert list(uses(ast.parse(text))) == []
