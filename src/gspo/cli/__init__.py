"""The ``gspo`` command: parses, calls ``launch``, ``report`` or ``check``, and turns errors into exit statuses.

Nothing here imports torch before a recipe has been read and checked.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

from gspo.errors import GspoError
from gspo.events.secrets import redact

#: Exit status after Ctrl-C, as shells count it: 128 + SIGINT.
INTERRUPTED = 130
#: Exit status of a run that ended at a safe point after SIGINT or SIGTERM, and can be continued.
STOPPED = 3
#: The disk is full, or the quota is used up.
_DISK = (errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status.

    0: done. 1: the run went wrong. 2: the input is wrong (one sentence on stderr). 3: stopped on request, with
    everything saved. 130: interrupted. An exception that is not ours keeps its traceback.
    """
    from gspo.cli.arguments import parse

    words = list(sys.argv[1:] if argv is None else argv)
    try:
        command, overrides = parse(words)
        return command.run(overrides, ["gspo", *words])
    except GspoError as error:
        said = redact(str(error))
        print(said if error.exit_status == STOPPED else f"error: {said}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if error.errno not in _DISK:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}the disk did not take what was written ({error.strerror}); free space", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # help, version and malformed flags
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
