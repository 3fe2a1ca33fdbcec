"""Penstock, as its README writes it.

Settings: keywords of `Loader`, as in "workers=4,order=ready". With "device=cpu" the batches are prepared on the CPU and
moved to the device as bytes, to be normalised there.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

import penstock as ps
from benchmarks.training.loaders import Batches, Job
from benchmarks.training.loaders.common import LENGTH, MEAN, RATE, STD, normalised

NOTE = ""
KINDS = ("image", "audio")


def batches(job: Job, setting: str) -> Batches:
    """See the package."""
    options: dict[str, Any] = {"device": job.device, "workers": job.cores, "seed": job.seed, **keywords(setting)}
    moved = options["device"] != job.device
    field = job.kind
    with ps.Loader(pipe(job, normalise=not moved), **options) as loader:
        while True:
            for batch in loader:
                inputs, labels = batch[field], batch["label"]
                if moved:
                    inputs, labels = inputs.to(job.device), labels.to(job.device)
                    inputs = normalised(inputs) if inputs.dtype == torch.uint8 else inputs
                yield inputs, labels


def keywords(setting: str) -> dict[str, Any]:
    """ "workers=4,order=ready" as a dict; what is no Python literal is a text."""
    pairs = (pair.partition("=") for pair in setting.split(",") if pair)
    return {name: _value(text) for name, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def pipe(job: Job, normalise: bool) -> ps.Pipe:
    """The common work."""
    paths, labels = job.files()
    times = -(-job.samples // len(paths))
    made = ps.files(paths * times, labels * times, field=job.kind)
    if job.kind == "audio":
        return made.decode_audio(mono=True).resample(RATE).crop_or_pad(LENGTH).batch(job.batch, drop_last=True)
    made = made.decode().random_resized_crop(job.size).flip()
    made = made.rand_augment(n=2, m=9) if job.augment == "rand" else made
    made = made.normalize(MEAN, STD) if normalise else made
    return made.batch(job.batch, drop_last=True)
