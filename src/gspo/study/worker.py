"""A worker process of ``gspo study run``: directories come in, one a line; one JSON line goes out for each.

It serves one job after the other, so that the libraries are loaded once. What a job prints goes to its own log.txt.
An error of ours ends the job; any other ends the worker, with the traceback in the log.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from gspo.errors import InputError
from gspo.study.execute import LOG, execute


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for line in sys.stdin:
        directory = Path(line.strip())
        with (directory / LOG).open("w", encoding="utf-8") as log:
            sys.stdout.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            try:
                answer: dict[str, str | None] = {"error": None}
                execute(directory)
            except InputError as error:
                answer = {"error": str(error)}
            except BaseException:
                traceback.print_exc(file=log)
                log.flush()
                raise
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
