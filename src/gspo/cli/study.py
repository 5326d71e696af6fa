"""``gspo study``: the claims of the paper as judged experiments."""

from __future__ import annotations

from pathlib import Path

from gspo.errors import InputError
from gspo.events import replace_file
from gspo.study.load import LoadedStudy, cells, load_study, study_names


def list_studies() -> int:
    """Prints name, claim and size of every study."""
    for name in study_names():
        study = load_study(name).study
        print(f"{name:20} {len(cells(study)):4} runs  {study.claim}")
    return 0


def run(name: str, directory: Path | None, *, quick: bool, explore: bool, jobs: int) -> int:
    """Makes the missing runs, then the pages."""
    from gspo.study.run import run_study

    if jobs < 1:
        raise InputError(f"--jobs is {jobs}; at least 1 process is needed")
    loaded = load_study(name)
    place = _directory(loaded, directory, quick)
    run_study(loaded, place, jobs=jobs, quick=quick, explore=explore, say=_say)
    return 0 if explore else report(name, place, quick=quick, results=None, publish=None)


def report(name: str, directory: Path | None, *, quick: bool, results: Path | None, publish: Path | None) -> int:
    """Judges what is there and writes the pages; prints the verdict and their paths."""
    from gspo.study.collect import collect, read_results
    from gspo.study.judge import judge
    from gspo.study.page import html_page, publish_pages

    loaded = load_study(name)
    place = _directory(loaded, directory, quick)
    found = collect(loaded, place, quick=quick) if results is None else read_results(results, loaded)
    judgement = judge(loaded.study, found)
    _say(f"{loaded.study.name}: {judgement.word} ({judgement.reason})")
    _say(f"page: {publish_pages(loaded.study, found, publish or place)}")
    place.mkdir(parents=True, exist_ok=True)
    replace_file(place / "report.html", html_page(loaded.study, found).encode())
    _say(f"report: {place / 'report.html'}")
    return 0


def _directory(loaded: LoadedStudy, directory: Path | None, quick: bool) -> Path:
    return directory or Path("runs") / "studies" / f"{loaded.study.name}{'-quick' if quick else ''}"


def _say(text: str) -> None:
    print(text, flush=True)
