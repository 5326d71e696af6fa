"""The run directory: what is in it, how it is written, how it is read.

::

    runs/demo/
    ├── recipe.toml              the resolved configuration
    ├── run.json                 command, versions, seed, host, start time
    ├── events.jsonl             one JSON object a line, see schema.py
    ├── attempts.json            the times that the run went back to an earlier checkpoint
    ├── abandoned/               events of the stretches that it left
    ├── journal/                 rollouts and verdicts since the oldest kept checkpoint
    ├── summary.json             the last word of a finished run
    ├── checkpoints/step-000010/ Hugging Face directories
    └── run.lock                 held by the process that writes

Readers (reports, the terminal view) know this package and nothing else of the trainer. Needs no torch.

Read in this order: schema, metrics, secrets, files, log, run_directory.
"""

from gspo.events.files import append, replace_file, sync_path, write_all, write_json
from gspo.events.log import SYNCED, EventLog, EventWriter, read_event_log, read_events
from gspo.events.metrics import METRICS, MetricInfo, find_metric
from gspo.events.run_directory import RunDirectory, package_versions
from gspo.events.schema import (
    EVENT_TYPES,
    AuditEvent,
    CalibrationEvent,
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    Event,
    GoBackEvent,
    Sample,
    SamplesEvent,
    SftEvent,
    StartEvent,
    StepEvent,
    UpdateEvent,
    WarningEvent,
)
from gspo.events.secrets import redact

__all__ = [
    "EVENT_TYPES",
    "METRICS",
    "SYNCED",
    "AuditEvent",
    "CalibrationEvent",
    "CheckpointEvent",
    "EndEvent",
    "EvaluationEvent",
    "Event",
    "EventLog",
    "EventWriter",
    "GoBackEvent",
    "MetricInfo",
    "RunDirectory",
    "Sample",
    "SamplesEvent",
    "SftEvent",
    "StartEvent",
    "StepEvent",
    "UpdateEvent",
    "WarningEvent",
    "append",
    "find_metric",
    "package_versions",
    "read_event_log",
    "read_events",
    "redact",
    "replace_file",
    "sync_path",
    "write_all",
    "write_json",
]
