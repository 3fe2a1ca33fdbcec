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


_CACHE = {
    "hits": ("counter", "cache_hits_total", "Samples that came from the cache"),
    "misses": ("counter", "cache_misses_total", "Samples that were read from storage"),
    "hit_bytes": ("counter", "cache_hit_bytes_total", "Encoded bytes that came from the cache"),
    "read_bytes": ("counter", "storage_read_bytes_total", "Bytes that were requested from storage"),
    "spoiled": ("counter", "cache_spoiled_total", "Samples of the cache found damaged or outdated, and read again"),
    "samples": ("gauge", "cache_samples", "Samples of this data set in the cache"),
    "bytes": ("gauge", "cache_bytes", "Memory of this data set's samples in the cache"),
    "decoded_samples": ("gauge", "cache_decoded_samples", "Samples of this data set in the cache as pixels"),
    "decoded_bytes": ("gauge", "cache_decoded_bytes", "Memory of this data set's pixels in the cache"),
    "held_bytes": ("gauge", "cache_held_bytes", "Memory of the whole cache, which loaders share"),
    "budget_bytes": ("gauge", "cache_budget_bytes", "Memory that the whole cache may take"),
    "given_back_bytes": ("counter", "cache_given_back_bytes_total", "Memory that the cache gave back under pressure"),
}
"""Of loaders that have a cache."""

_DISK = {
    "samples": ("counter", "disk_samples_total", "Samples read from the disk tier"),
    "bytes": ("counter", "disk_read_bytes_total", "Bytes read from the disk tier"),
    "kept_samples": ("counter", "disk_kept_samples_total", "Samples that were kept in the disk tier"),
    "kept_bytes": ("counter", "disk_kept_bytes_total", "Bytes that were kept in the disk tier"),
    "damaged": ("counter", "disk_damaged_total", "Samples found damaged in the disk tier, and read from the source"),
    "source_samples": ("counter", "source_samples_total", "Samples read from the source behind the disk tier"),
    "source_bytes": ("counter", "source_read_bytes_total", "Bytes read from the source behind the disk tier"),
    "source_s": ("counter", "source_seconds_total", "Time spent reading from the source behind the disk tier"),
}
"""Of loaders that have a disk tier."""


def prometheus(snapshot: Mapping[str, Any]) -> str:
    """The text exposition format, version 0.0.4."""
    labels = f'{{loader="{_escape(snapshot["name"])}",pid="{snapshot["pid"]}"}}'
    lines = []
    for metrics, values in ((_METRICS, snapshot), (_CACHE, snapshot["cache"]), (_DISK, snapshot["disk"])):
        for key, (kind, name, help) in metrics.items() if values is not None else ():
            lines += [f"# HELP penstock_{name} {help}", f"# TYPE penstock_{name} {kind}"]
            lines.append(f"penstock_{name}{labels} {values[key]}")
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
