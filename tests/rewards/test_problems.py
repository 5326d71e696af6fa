import json

import pytest

from gspo.errors import DataError, InputError
from gspo.rewards.problems import CodeTest, read_problem


def test_programs_and_calls():
    stdio = read_problem(
        '{"tests": [["1\\n", "2"]], "cpu_s": 2, "memory_mb": 64, "comparison": "tokens", "tolerance": 0}'
    )
    assert stdio.tests == (CodeTest(b"1\n", b"2"),)
    assert (stdio.function, stdio.limits.cpu_s, stdio.limits.memory_mb) == ("", 2, 64)
    assert (stdio.comparison, stdio.tolerance) == ("tokens", 0)
    call = read_problem({"fn": "scale(xs,k)", "tests": [[[[1], 2], [2]]]})
    assert call.function == "scale"
    assert call.tests == (CodeTest([[1], 2], [2]),)


def test_the_form_of_apps():
    assert read_problem({"inputs": ["1"], "outputs": ["2"]}).tests == (CodeTest(b"1", b"2"),)
    call = read_problem({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"})
    assert (call.function, call.tests) == ("add", (CodeTest([1, 2], 3),))


def test_defaults_give_way_to_the_problem():
    value = {"tests": [["", ""]], "cpu_s": 3}
    problem = read_problem(value, {"cpu_s": 1, "memory_mb": 32})
    assert (problem.limits.cpu_s, problem.limits.memory_mb) == (3, 32)


def test_checkers(tmp_path):
    (tmp_path / "c.py").write_text("pass")
    (tmp_path / "c").write_bytes(b"\x7fELF")
    tests = {"tests": [["", ""]]}
    assert read_problem({**tests, "checker": "print(1)"}).checker == "print(1)"
    assert read_problem({**tests, "checker_file": str(tmp_path / "c.py")}).checker == "pass"
    assert read_problem({**tests, "checker_file": str(tmp_path / "c")}).checker == b"\x7fELF"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"tests": []}, "has no tests; every program would pass"),
        ({"inputs": [], "outputs": []}, "has no tests"),
        ({}, "neither 'tests' nor"),
        ("{", "not JSON"),
        ("6", "are int; an object"),
        ({"test": [["", ""]]}, "unknown key 'test'; did you mean 'tests'"),
        ({"tests": [["1"]]}, "list of pairs"),
        ({"tests": "12"}, "list of pairs"),
        ({"tests": [[[1], 2]]}, "list .* where text is needed; is 'function' missing"),
        ({"tests": [["1", 2]], "function": "f"}, "not a list"),
        ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"tests": [["", ""]], "comparison": "fuzzy"}, "no comparison 'fuzzy'"),
        ({"tests": [["", ""]], "tolerance": "small"}, "tolerance is 'small'"),
        ({"tests": [["", ""]], "cpu_s": "4"}, "cpu_s is '4'"),
        ({"tests": [["", ""]], "checker": "", "checker_file": "x"}, "both 'checker' and"),
        ({"tests": [["", ""]], "checker_file": "/nowhere/c.py"}, "checker cannot be read"),
    ],
)
def test_what_cannot_be_read_is_a_data_error(value, message):
    with pytest.raises(DataError, match=message):
        read_problem(value)


def test_a_limit_of_zero_is_refused():
    with pytest.raises(InputError, match="limit cpu_s is 0"):
        read_problem({"tests": [["", ""]], "cpu_s": 0})


def test_text_of_any_kind_becomes_bytes():
    assert read_problem(json.dumps({"tests": [["\ud800", "é"]]})).tests[0].expected == "é".encode()
