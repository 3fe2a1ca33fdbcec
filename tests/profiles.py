"""Profiles for tests: plausible numbers, all of which a test may replace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.profile import Evidence, Operator, PrepPoint, Profile, ReadPoint, Split

__all__ = ["profile"]


def profile(**changes: Any) -> Profile:
    """ResNet-50 on one GPU, eight cores, eight workers, 130 GB of photographs of which 45 GB are cached."""
    batch_samples, storage, gpu = 256, 1900.0, 2400.0
    rate = 1170.0
    steps_s = tuple(batch_samples / rate * (0.8 if step % 8 else 2.4) for step in range(64))
    whole = Profile(
        version=1,
        script="train.py",
        loader="torch DataLoader of ImageFolder",
        steps_per_phase=64,
        ranks=1,
        cores=8,
        memory_bytes=64 * 10**9,
        cache_bytes=45 * 10**9,
        gpu="NVIDIA H200",
        gpus=1,
        dataset_samples=1_281_167,
        batch_samples=batch_samples,
        workers=8,
        overlapped=False,
        prefetch_batches=16,
        sample_bytes=110_000.0,
        dataset_bytes=1_281_167 * 110_000.0,
        batch_bytes=batch_samples * 3 * 224 * 224 * 4,
        gpu_samples_per_s=gpu,
        gpu_batches=(),
        step_cpu_s=0.02,
        prep_samples_per_s=2000.0,
        prep_cpu_s=8 / 2000,
        prep=(PrepPoint(1, 280.0, 1.0), PrepPoint(4, 1100.0, 1100 / 4 / 280), PrepPoint(8, 2000.0, 2000 / 8 / 280)),
        operators=(
            Operator("decode", 0.0019),
            Operator("RandomResizedCrop", 0.0007),
            Operator("read", 0.0001),
            Operator("ToTensor", 0.0002),
        ),
        memory_samples_per_s=60_000.0,
        memory_bytes_per_s=60_000 * 110e3,
        storage_samples_per_s=storage,
        storage_bytes_per_s=storage * 110e3,
        memory_cpu_s=0.0001,
        storage_cpu_s=0.0002,
        storage_wait_s=None,
        memory=(ReadPoint(1, 9_000.0, 9_000 * 110e3), ReadPoint(8, 60_000.0, 60_000 * 110e3)),
        storage=(ReadPoint(1, 300.0, 300 * 110e3), ReadPoint(8, storage, storage * 110e3)),
        rate_samples_per_s=rate,
        warm_samples_per_s=1960.0,
        split=Split(
            batch_samples / gpu,
            batch_samples / 1960 - batch_samples / gpu,
            0.8 * (batch_samples / rate - batch_samples / 1960),
            0.2 * (batch_samples / rate - batch_samples / 1960),
        ),
        lock_wait_s=0.001,
        copy_s=0.003,
        copy_bytes_per_s=50e9,
        resident_samples_per_s=2460.0,
        read_amplification=0.75,
        waits_s=tuple(max(0.0, step - batch_samples / gpu) for step in steps_s),
        steps_s=steps_s,
        gpu_steps_s=tuple(batch_samples / gpu * (1 + 0.01 * (-1) ** step) for step in range(64)),
        prep_batches_s=tuple(batch_samples / 2000 * (1 + 0.1 * (-1) ** step) for step in range(64)),
        prep_evidence=Evidence(64 * 256 * 110_000, 0, "/proc/PID/io"),
        storage_evidence=Evidence(64 * 256 * 110_000, 64 * 256 * 111_000, "/proc/PID/io"),
        watch_evidence=Evidence(64 * 256 * 110_000, 48 * 256 * 110_000, "/proc/PID/io"),
        in_memory=True,
        cold=True,
        notes=(),
    )
    return replace(whole, **changes)
