"""The composition root: the only package that knows every part. A recipe comes in, parts are built, a run is started.

Read from below::

    house | log | signals | settings     what a recipe names, where a run speaks, how it is stopped, bounds and loss
    checkpoints                          written and found again
    parts | stages                       what the loop works with; what comes before and after it
    runs                                 train, resume, sft, evaluate
"""

from gspo.launch.checkpoints import Saver, Start
from gspo.launch.house import House, build
from gspo.launch.log import Log
from gspo.launch.parts import At
from gspo.launch.runs import evaluate, resume, sft, train
from gspo.launch.signals import StopSignal

__all__ = [
    "At",
    "House",
    "Log",
    "Saver",
    "Start",
    "StopSignal",
    "build",
    "evaluate",
    "resume",
    "sft",
    "train",
]
