"""Counters as text, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["prometheus"]

_METRICS = {
    "batches": ("counter", "batches_total", "Batches delivered to the training process"),
    "samples": ("counter", "samples_total", "Samples delivered to the training process"),
    "wait_s": ("counter", "wait_seconds_total", "Time the training process waited for a batch"),
    "batches_copied": ("counter", "batches_copied_total", "Batches copied because the user kept many"),
    "workers_lost": ("counter", "workers_lost_total", "Worker processes that died and were replaced"),
    "bad_samples": ("counter", "bad_samples_total", "Samples that could not be prepared"),
    "window": ("gauge", "window_batches", "Batches begun or waiting for the training process"),
    "slots": ("gauge", "slots", "Slots of batch memory"),
    "slots_free": ("gauge", "slots_free", "Slots that are free"),
    "slots_held": ("gauge", "slots_held", "Slots whose tensors the user holds"),
    "slot_bytes": ("gauge", "slot_bytes", "Size of a slot"),
}


def prometheus(snapshot: Mapping[str, Any]) -> str:
    """The text exposition format, version 0.0.4."""
    labels = f'{{loader="{_escape(snapshot["name"])}",pid="{snapshot["pid"]}"}}'
    lines = []
    for key, (kind, name, help) in _METRICS.items():
        lines += [f"# HELP penstock_{name} {help}", f"# TYPE penstock_{name} {kind}"]
        lines.append(f"penstock_{name}{labels} {snapshot[key]}")
    for key, name, help in (
        ("samples", "worker_samples_total", "Samples a worker prepared"),
        ("busy_s", "worker_busy_seconds_total", "Time a worker worked"),
    ):
        lines += [f"# HELP penstock_{name} {help}", f"# TYPE penstock_{name} counter"]
        for worker in snapshot["workers"]:
            lines.append(f'penstock_{name}{labels[:-1]},worker="{worker["number"]}"}} {worker[key]}')
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
