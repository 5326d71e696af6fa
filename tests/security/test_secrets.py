"""Secrets of the environment reach neither what a run writes nor the processes that judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo.errors import ConfigError, RewardError
from gspo.events import read_events
from gspo.events.secrets import MIN_LENGTH, is_secret, redact, without_secrets
from gspo.report.html import write_report
from gspo.train.journal import Journal

from .rewards import SECRETS
from .runs import contents, train


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def forms(value: str) -> list[bytes]:
    """A value as it may stand in a file: plain, and as JSON writes it."""
    texts = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return [text.encode() for text in texts]


def leaks(folder: Path) -> list[tuple[str, str]]:
    return [
        (file, name)
        for file, data in contents(folder).items()
        for name, value in SECRETS.items()
        if any(form in data for form in forms(value))
    ]


def test_reasons_of_scores_come_to_the_files_without_them(tmp_path: Path) -> None:
    more = '[[reward.functions]]\nname = "tests.security.rewards:secrets_in_scores"\n'
    run = train(tmp_path, more, command=("gspo", "train", f"--token={SECRETS['HF_TOKEN']}"))
    write_report([run], run / "report.html")
    assert leaks(run) == []
    # The reasons did come to the files: the names are there in place of the values.
    assert all(f"[{name}]" in (run / "events.jsonl").read_text() for name in SECRETS)
    assert "--token=[HF_TOKEN]" in json.loads((run / "run.json").read_text())["command"]


def test_the_journal_has_names_in_place_of_values_and_can_be_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(1, "scores", "k", scores=[{"failure": " ".join(SECRETS.values())}])
    journal.close()
    assert leaks(tmp_path) == []
    record = Journal(tmp_path).find(1, "scores", "k")
    assert record is not None
    assert record["scores"] == [{"failure": " ".join(f"[{name}]" for name in SECRETS)}]


def test_the_message_of_a_reward_that_raises_comes_to_the_events_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RewardError):
        train(tmp_path, '[[reward.functions]]\nname = "tests.security.rewards:secrets"\n')
    assert leaks(tmp_path / "run") == []
    end = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert all(f"[{name}]" in end["message"] for name in SECRETS)


def test_an_isolated_reward_does_not_see_them(tmp_path: Path) -> None:
    more = 'isolate = true\nnum_workers = 1\n[[reward.functions]]\nname = "tests.security.rewards:secrets"\n'
    run = train(tmp_path, more)
    assert any(b"unset unset unset unset unset" in data for data in contents(run).values())
    assert leaks(run) == []


def test_it_sees_the_one_that_the_recipe_names(tmp_path: Path) -> None:
    more = (
        'isolate = true\nnum_workers = 1\nenvironment = ["OPENAI_API_KEY"]\n'
        '[[reward.functions]]\nname = "tests.security.rewards:secrets"\n'
    )
    run = train(tmp_path, more)
    assert any(b"unset unset unset unset [OPENAI_API_KEY]" in data for data in contents(run).values())
    assert leaks(run) == []


def test_a_recipe_with_the_value_of_one_is_refused(tmp_path: Path) -> None:
    more = f'[[reward.functions]]\nname = "json:loads"\noptions = {{ key = "{SECRETS["OPENAI_API_KEY"]}" }}\n'
    with pytest.raises(ConfigError, match=r"recipe\.toml:.*\[OPENAI_API_KEY\]") as caught:
        train(tmp_path, more)
    assert SECRETS["OPENAI_API_KEY"] not in str(caught.value)


@pytest.mark.parametrize("name", ["HF_TOKEN", "hf_token", "KEY", "API_KEY_2", "GITHUB_TOKEN", "DB_PASSWORD", "APIKEY"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["PWD", "PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "HOME"])
def test_other_names(name: str) -> None:
    assert not is_secret(name)


def test_short_values_are_left_in_texts_but_not_passed_on() -> None:
    environment = {"A_TOKEN": "1" * (MIN_LENGTH - 1), "PATH": "/bin", "B_KEY": "x"}
    assert redact("11111 x", environment) == "11111 x"
    assert without_secrets(environment) == {"PATH": "/bin"}
    assert without_secrets(environment, keep=["B_KEY"]) == {"PATH": "/bin", "B_KEY": "x"}
